"""Embed the allocator in an engine of your own: page tables, slots and sharing, with NumPy alone.

Run it: `python examples/embed_allocator.py`. It needs no model and no GPU; where an engine would run its kernels, this
script only says so.
"""

from __future__ import annotations

import numpy as np

from pagedkv.cache import Admitted, Extended, KVCacheManager, Never, Wait, check

PAGE_SIZE = 4


def show(manager: KVCacheManager, title: str) -> None:
    """Print who owns which page, and where all pages are."""
    usage = manager.usage()
    print(f"\n{title}")
    for row in np.flatnonzero(manager.table.live).tolist():
        pages = manager.table.table[row, : manager.table.pages[row]].tolist()
        computed, length = manager.table.computed[row], manager.table.length[row]
        print(f"  {manager.table.owners[row]:<6} pages {pages}, {computed} of {length} tokens computed")
    print(
        f"  pool   {usage.used} used + {usage.cached} cached + {usage.free} free = {usage.total} pages; "
        f"sharing saves {usage.saved}; {usage.waste:.0%} of the used slots are empty"
    )


def admit(manager: KVCacheManager, owner: str, prompt: list[int]) -> Admitted:
    """Admit a prompt that this story knows to fit. An engine looks at the answer's type instead."""
    answer = manager.admit(prompt, owner=owner)
    if not isinstance(answer, Admitted):
        raise SystemExit(f"{owner} was expected to fit: {answer}")
    return answer


def main() -> None:
    """The life of three requests in a pool of 6 pages."""
    manager = KVCacheManager(num_pages=6, page_size=PAGE_SIZE, max_rows=8, max_seq_len=64)
    system_prompt = [11, 12, 13, 14, 15, 16, 17, 18]

    # Admission draws pages for the prompt. `cached_tokens` of it are there already; the engine computes the rest.
    alice = admit(manager, "alice", [*system_prompt, 21, 22])
    show(manager, f"1. alice is admitted: {alice.cached_tokens} tokens cached, 10 to compute")

    # The engine runs its prefill on `slots` (slot = page * page_size + offset) and then says so.
    slots = manager.table.slots(alice.sequence.row, alice.cached_tokens, 10)
    print(f"  prefill writes keys and values to slots {slots.tolist()}")
    manager.commit(alice.sequence.row, 10)

    # Full pages that have been computed are shared from now on.
    bob = admit(manager, "bob", [*system_prompt, 31])
    manager.commit(bob.sequence.row, 1)
    show(manager, f"2. bob begins like alice: {bob.cached_tokens} of his 9 tokens are cached, 1 is computed")

    # A decode step: one token for every row, in one call. A page is drawn only where a row crosses a page's end.
    rows = [alice.sequence.row, bob.sequence.row]
    for step in range(3):
        step_slots = manager.extend(rows, [40 + step, 50 + step])
        if isinstance(step_slots, Extended):  # always, in this story
            print(f"  decode step {step}: slots {step_slots.slots.tolist()}, pages free: {manager.usage().free}")
        manager.commit(rows, 1)
    show(manager, "3. both have decoded 3 tokens; table rows go to the kernel as they are")
    print(manager.table.table[rows, :4])

    # Two different refusals. Neither has changed anything.
    carol = [*range(60, 69)]
    print("\n4. the pool is nearly full")
    for owner, prompt in (("carol", carol), ("dave", list(range(100, 130)))):
        answer = manager.admit(prompt, owner=owner)
        if isinstance(answer, Wait):
            print(f"  {owner} must wait: {answer.needed} pages are needed, {answer.free} to be had now")
        elif isinstance(answer, Never):
            print(f"  {owner} can never be served: {answer.needed} pages are needed, the pool has {answer.capacity}")

    # Release returns pages at once. Indexed ones stay as cache until somebody needs the room.
    manager.release([alice.sequence])
    manager.release([alice.sequence])  # a handle that was given back already is ignored
    show(manager, "5. alice has left; her own full page stays cached")
    waiting = admit(manager, "carol", carol)
    show(manager, "6. now carol fits; the oldest cached page was evicted for her")

    manager.release([bob.sequence, waiting.sequence])
    check(manager)  # recomputes every invariant from the arrays, and raises with names if one does not hold
    show(manager, "7. everybody has left: no page is used, and the audit finds nothing")
    warm = manager.match([*system_prompt, 99])
    print(f"  the system prompt is still warm: {warm} of {len(system_prompt)} tokens")


if __name__ == "__main__":
    main()
