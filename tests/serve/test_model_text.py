"""What is known of a text before it is tokenized."""

from __future__ import annotations

import pytest

from pagedkv.errors import NeverFitsError
from pagedkv.serve.model_text import ModelText


def test_a_text_that_no_tokenization_makes_fit_is_refused() -> None:
    text = ModelText(tokenizer=None, tools=None, added_tokens={}, longest_token=5)
    text.check_fits(["x" * 30, "y" * 20], max_seq_len=10)
    with pytest.raises(NeverFitsError, match="51 characters comes to more than 10 tokens; max_seq_len is 10"):
        text.check_fits(["x" * 30, "y" * 21], max_seq_len=10)
