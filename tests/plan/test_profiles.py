"""Measured step times: fitted, written and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import ConfigError
from pagedkv.plan.profiles import Measured, Profile, fit, read_profile, write_profile
from pagedkv.plan.steptime import FEATURES, Work, features


def steps_of(coefficients: list[float]) -> list[Measured]:
    """Steps of many shapes that take exactly as long as these coefficients say."""
    random = np.random.default_rng(0)
    steps = []
    for _ in range(60):
        n = int(random.integers(1, 32))
        work = Work(random.integers(0, 1000, n), random.integers(1, 64, n))
        amounts = features(work)
        steps.append(Measured(tuple(amounts), float(amounts[:-1] @ np.array(coefficients))))
    return steps


def test_a_fit_finds_the_coefficients_that_made_the_times() -> None:
    truth = [0.02, 4e-4, 5e-4, 3e-6, 9e-8]
    found, error = fit(steps_of(truth), bandwidth=1e10)
    assert found == pytest.approx((*truth, 2e-10), rel=1e-6)
    assert error < 1e-9


def test_no_coefficient_is_negative() -> None:
    found, _ = fit(steps_of([0.02, -1e-5, 5e-4, 0, 0]), bandwidth=1e10)
    assert min(found) == 0


def test_a_tenth_of_the_steps_held_up_changes_nothing() -> None:
    """Another process, a page fault: some steps take several times as long."""
    truth = [0.02, 4e-4, 5e-4, 3e-6, 9e-8]
    steps = [Measured(a, seconds * (4 if n % 10 == 0 else 1)) for n, (a, seconds) in enumerate(steps_of(truth))]
    found, _ = fit(steps, bandwidth=1e10)
    assert found[:5] == pytest.approx(truth, rel=1e-6)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 measured steps; a fit needs at least 6"):
        fit(steps_of([1, 1, 1, 1, 1])[:5], 1e9)


def a_profile() -> Profile:
    steps = tuple(steps_of([0.02, 4e-4, 5e-4, 3e-6, 9e-8]))
    coefficients, error = fit(steps, 1e10)
    return Profile("model", "machine", 100, 2048, 1e10, steps, coefficients, error)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_profile(tmp_path / "profile.json", a_profile())
    assert read_profile(tmp_path / "profile.json") == a_profile()
    assert len(FEATURES) == len(a_profile().time.coefficients)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "of another version"),
        ({"features": ["step"]}, "of another version"),
        ({"coefficients": [1]}, "1 coefficients"),
        ({"steps": 3}, "cannot be read as a profile"),
        ({"surprise": 1}, "cannot be read as a profile"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, a_profile())
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        read_profile(path)


def test_a_profile_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_profile(tmp_path / "no" / "profile.json", a_profile())
