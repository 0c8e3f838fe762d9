"""Where special tokens stand in a text.

Knows texts and ids only; which tokens are special in a call is the caller's choice. Rule to keep:
the time is linear in the text, whatever it holds, as texts come from outside.
"""

from collections.abc import Mapping


def split_special(text: str, special: Mapping[str, int]) -> list[str | int]:
    """Cut `text` at the special tokens of `special`, which are tried in its order.

    Longer tokens come first and are found in the whole text before shorter ones, as in llama.cpp.
    """
    found: list[tuple[int, int, int]] = []  # start, stop, token id
    taken = bytearray(len(text))
    characters = set(text)
    for token, token_id in special.items():
        if not characters.issuperset(token):
            continue  # nearly all tokens of nearly all texts end here, without a search
        start = text.find(token)
        while start >= 0:
            stop = start + len(token)
            clash = taken.find(1, start, stop)
            if clash >= 0:
                free = taken.find(0, clash)
                start = text.find(token, free) if free >= 0 else -1
                continue
            taken[start:stop] = b"\1" * len(token)
            found.append((start, stop, token_id))
            start = text.find(token, stop)
    fragments: list[str | int] = []
    done = 0
    for start, stop, token_id in sorted(found):
        if start > done:
            fragments.append(text[done:start])
        fragments.append(token_id)
        done = stop
    if done < len(text):
        fragments.append(text[done:])
    return fragments
