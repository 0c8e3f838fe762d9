import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.command.sizes import PoolSize, format_size, parse_pool, parse_size


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("1", 1),
        ("1048576", 1048576),
        ("800M", 800 << 20),
        ("800m", 800 << 20),
        ("800MiB", 800 << 20),
        ("800MB", 800_000_000),
        ("1.5G", 3 << 29),
        (".5K", 512),
        ("2T", 2 << 40),
        (" 64K ", 64 << 10),
        ("9007199254740993", 9007199254740993),  # one more than a float can hold
        ("0.1K", 102),
    ],
)
def test_sizes_as_people_write_them(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize(
    "text",
    ["", "M", "-1", "+1", "1,5G", "1e9", "0", "0.0G", "0.0001", "1 000", "1P", "1Mi", "2048P",
     "9" * 30, "0x10", "٣M", "1MM", "nan", "inf", "40%"],
)  # fmt: skip
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "pool", "spelled"),
    [
        ("40%", PoolSize(share=0.4), "40%"),
        ("12.5%", PoolSize(share=0.125), "12.5%"),
        ("100%", PoolSize(share=1.0), "all"),
        ("ALL", PoolSize(share=1.0), "all"),
        ("1K", PoolSize(n_bytes=1024), "1024"),
    ],
)
def test_pools(text: str, pool: PoolSize, spelled: str) -> None:
    assert parse_pool(text) == pool
    assert str(pool) == spelled
    assert parse_pool(spelled) == pool


@pytest.mark.parametrize("text", ["", "0%", "100.1%", "-5%", "%", "nan%", "1e1%", "some", "4 0%"])
def test_what_is_no_pool(text: str) -> None:
    with pytest.raises(ValueError):
        parse_pool(text)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (10 << 20, "10.0 MiB"),
        (465 << 20, "465 MiB"),
        (3 << 29, "1.50 GiB"),
        (1023 << 20, "1.00 GiB"),
        (2**60, "1.00 EiB"),
    ],
)
def test_three_digits_in_the_largest_unit(n_bytes: int, text: str) -> None:
    assert format_size(n_bytes) == text


@given(st.integers(1, 2**60))
def test_a_number_of_bytes_is_itself(n_bytes: int) -> None:
    assert parse_size(str(n_bytes)) == n_bytes
    assert len(format_size(n_bytes)) <= 9
