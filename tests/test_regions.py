import ctypes
from pathlib import Path

from read_cases import opened, pattern, pool_of, write_file

from compute_worker.known_experts import addresses_of, may_be_used
from compute_worker.regions import Regions
from shm.mapped_files import MappedFiles
from shm.messages import Location, SlotLease

LAYER, EXPERT = 3, 7
IN_POOL = Location(EXPERT, SlotLease(1, 5), 0, 5000, 6000, 7000)


def byte_at(address: int) -> int:
    return ctypes.c_ubyte.from_address(address).value


def test_a_location_in_the_pool_is_checked() -> None:
    with pool_of(2, 2000, 2000, 2000) as (pool, _):
        for offset, value in ((5000, 1), (6000, 2), (7000, 3)):
            pool.view[offset] = value
        pool.write_header(1, 5, LAYER, EXPERT, 6000)
        regions = Regions(pool, None)
        assert regions.is_intact(LAYER, IN_POOL)
        assert may_be_used(regions.entries(LAYER, [IN_POOL, IN_POOL]))
        assert [byte_at(a) for a in regions.addresses(IN_POOL)] == [1, 2, 3]
        for layer, location in (
            (LAYER + 1, IN_POOL),
            (LAYER, IN_POOL._replace(expert=EXPERT + 1)),
            (LAYER, IN_POOL._replace(lease=SlotLease(1, 6))),
            (LAYER, IN_POOL._replace(lease=SlotLease(0, 5))),
        ):
            assert not regions.is_intact(layer, location)
            entries = regions.entries(layer, [location])
            assert not may_be_used(entries)
            assert addresses_of(entries).tolist() == [list(regions.addresses(location))]


def test_a_location_in_a_file_may_go_on_in_the_next(tmp_path: Path) -> None:
    first, second = pattern(5000), pattern(5000)[::-1]
    with (
        opened(write_file(tmp_path / "first", first)) as a,
        opened(write_file(tmp_path / "second", second)) as b,
    ):
        regions = Regions(None, MappedFiles([a.fd, b.fd], [5000, 5000]))
        lease = SlotLease(9, 0)
        place = Location(EXPERT, lease, 1, 10, 4999, 2 * 4096 + 20)
        assert regions.is_intact(LAYER, place)
        assert may_be_used(regions.entries(LAYER, [place]))
        found = regions.addresses(place)
        assert [byte_at(a) for a in found] == [first[10], first[4999], second[20]]
        found = regions.addresses(Location(EXPERT, lease, 2, 0, 1, 4999))
        assert [byte_at(a) for a in found] == [second[0], second[1], second[4999]]
