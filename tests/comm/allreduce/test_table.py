"""The tables of measured algorithms: their file and its errors, which table applies, and what it selects."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.comm import Communicator
from gradsync.comm.allreduce.autotune import measure, rules_from, winner
from gradsync.comm.allreduce.selector import SelectedAllReduce, select_all_reduce
from gradsync.comm.allreduce.table import (
    Machine,
    Rule,
    Table,
    TableFile,
    load_if_there,
    load_tables,
    save_table,
    table_file,
    this_machine,
)
from gradsync.comm.connect import connect
from gradsync.testing import run_ranks
from gradsync.testing.faults import Faulty
from tests.support.ranks import run_processes

ELSEWHERE = Machine("elsewhere", 96)


def table(*rules: Rule, world_size: int = 3, transport: str = "threads", machine: Machine | None = None) -> Table:
    return Table(
        transport=transport,
        world_size=world_size,
        num_hosts=1,
        machine=machine or this_machine(),
        rules=rules or ((100, "tree"), (1000, "ring"), (None, "native")),
    )


# -- the file ---------------------------------------------------------------------------------------------------------


def test_save_table_replaces_only_the_table_of_the_same_group_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "tables.json"
    others = [table(world_size=4), table(transport="c10d"), table(machine=ELSEWHERE)]
    for each in [table((None, "direct")), *others, table()]:
        save_table(path, each)
    assert load_tables(path) == [*others, table()]
    assert [file.name for file in path.parent.iterdir()] == ["tables.json"], "nothing is left beside it"


def test_load_if_there_returns_no_tables_without_a_file(tmp_path: Path) -> None:
    assert load_if_there(tmp_path / "none.json") == []
    with pytest.raises(FileNotFoundError):
        load_tables(tmp_path / "none.json")


def test_table_file_is_the_users_own_or_the_named_one() -> None:
    assert table_file({}) == TableFile(Path.home() / ".config/gradsync/collectives.json")
    assert table_file({"XDG_CONFIG_HOME": "/x"}) == TableFile(Path("/x/gradsync/collectives.json"))
    assert table_file({"XDG_CONFIG_HOME": "/x", "GRADSYNC_COLLECTIVES": "/a.json"}) == TableFile(Path("/a.json"), True)


def wrong(**changes: Any) -> dict[str, Any]:
    return {"format": 1, "tables": [{**table().as_json(), **changes}]}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "Expecting property name"),
        ([], "it must be an object with 'format' and 'tables'; got []"),
        ({"format": 2, "tables": []}, "format must be 1; got 2"),
        ({"format": 1, "tables": {}}, "tables must be a list; got {}"),
        ({"format": 1, "tables": [7]}, "tables[0] must be an object; got 7"),
        ({"format": 1, "tables": [{"host": "a"}]}, "tables[0] must be an object with transport, world_size,"),
        (wrong(extra=1), "tables[0] must be an object with"),
        (wrong(transport=3), "tables[0].transport must be text; got 3"),
        (wrong(world_size=0), "tables[0].world_size must be a whole number of at least 1; got 0"),
        (wrong(num_cores=True), "tables[0].num_cores must be a whole number of at least 1; got True"),
        (wrong(rules="ring"), "tables[0].rules must be a list; got 'ring'"),
        (wrong(rules=[]), "tables[0].rules must be at least one rule; got []"),
        (wrong(rules=[[None]]), "tables[0].rules[0] must be [largest size in bytes, algorithm]; got [None]"),
        (wrong(rules=[[None, "rings"]]), "tables[0].rules[0][1] must be one of native, ring, halving"),
        (wrong(rules=[[10, "ring"]]), "tables[0].rules[0][0] must be null, since it is the last"),
        (wrong(rules=[[10, "ring"], [10, "tree"], [None, "ring"]]), "rules[1][0] must be a number of bytes above 10"),
        (wrong(rules=[["10", "ring"], [None, "ring"]]), "rules[0][0] must be a number of bytes above -1"),
        ({"format": 1, "tables": 2 * wrong()["tables"]}, "tables[1] must be for a group and machine that no other"),
    ],
)
def test_load_tables_says_what_is_wrong_in_a_file(tmp_path: Path, content: Any, expected: str) -> None:
    path = tmp_path / "tables.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(expected)) as error:
        load_tables(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "run `gradsync tune-comm` again" in str(error.value)


# -- which table applies ----------------------------------------------------------------------------------------------


def tensor_of(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def test_select_all_reduce_uses_rank_0s_table_on_every_rank(tmp_path: Path) -> None:
    save_table(tmp_path / "0.json", table())
    save_table(tmp_path / "1.json", table((None, "halving")))  # and rank 2 has none

    def names(comm: Communicator) -> list[str]:
        selected = select_all_reduce(comm, TableFile(tmp_path / f"{comm.rank}.json"))
        assert isinstance(selected, SelectedAllReduce)
        t = torch.ones(200)
        selected.all_reduce(t).wait()
        assert torch.equal(t, torch.full((200,), 3.0))
        return [selected.algorithm_for(tensor_of(size)) for size in (0, 100, 101, 1000, 1001)]

    assert run_ranks(3, names) == [["tree", "tree", "ring", "ring", "native"]] * 3


def test_select_all_reduce_raises_on_every_rank_if_rank_0_cannot_read_its_file(tmp_path: Path) -> None:
    (tmp_path / "tables.json").write_text("nonsense")
    errors: list[str] = []

    def names(comm: Communicator) -> None:
        with pytest.raises(ValueError) as error:
            select_all_reduce(comm, TableFile(tmp_path / "tables.json" if comm.rank == 0 else tmp_path / "none.json"))
        errors.append(str(error.value))

    run_ranks(3, names)
    assert len(set(errors)) == 1
    assert errors[0].startswith(f"{tmp_path}/tables.json: Expecting value")


def test_select_all_reduce_returns_the_communicator_itself_without_a_table(tmp_path: Path) -> None:
    def is_same(comm: Communicator) -> bool:
        return select_all_reduce(comm, TableFile(tmp_path / "none.json")) is comm

    assert run_ranks(2, is_same) == [True, True]


def test_select_all_reduce_skips_another_machines_table_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tables.json"
    save_table(path, table(world_size=2, machine=ELSEWHERE))
    with caplog.at_level(logging.INFO, "gradsync"):
        assert run_ranks(2, lambda comm: select_all_reduce(comm, TableFile(path)) is comm) == [True, True]
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 1
    assert "measured on elsewhere (96 cores) and are not used on" in logged[0]
    assert "gradsync tune-comm -n 2" in logged[0]

    def names(comm: Communicator) -> list[str]:
        selected = select_all_reduce(comm, TableFile(path, named=True))
        assert isinstance(selected, SelectedAllReduce)
        return [selected.algorithm_for(tensor_of(1))]

    assert run_ranks(2, names) == [["tree"], ["tree"]], "a file that the user names applies on any machine"
    save_table(path, table((None, "doubling"), world_size=2))
    assert run_ranks(2, names) == [["doubling"], ["doubling"]], "and this machine's own table comes first"


def test_select_all_reduce_requires_a_named_file_to_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*none\.json, which GRADSYNC_COLLECTIVES names"):
        run_ranks(2, lambda comm: select_all_reduce(comm, TableFile(tmp_path / "none.json", named=True)))


def test_split_uses_the_table_of_its_own_size(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    for each in (table((None, "tree"), world_size=2), table((None, "ring"), world_size=3)):
        save_table(path, each)

    def names(comm: Communicator) -> list[str]:
        selected = select_all_reduce(comm, TableFile(path))
        groups = [selected, selected.clone(), selected.split([2, 0]), selected.split([1])]
        return [group.algorithm_for(tensor_of(9)) for group in groups if isinstance(group, SelectedAllReduce)]

    assert run_ranks(3, names) == [["ring", "ring", "tree"], ["ring", "ring", "native"], ["ring", "ring", "tree"]]


def test_table_applies_to_one_number_of_hosts() -> None:
    def names(comm: Communicator) -> list[str]:
        tables = [table((None, "ring")), table((None, "tree"), world_size=2)]
        apart = SelectedAllReduce(comm, tables, ["a", "a", "b"])
        pair = apart.split([0, 1])
        return [group.algorithm_for(tensor_of(9)) for group in (apart, pair) if isinstance(group, SelectedAllReduce)]

    assert run_ranks(3, names) == [["native", "tree"], ["native", "tree"], ["native"]]


def test_algorithm_for_is_native_for_placed_buckets_and_other_devices() -> None:
    def names(comm: Communicator) -> list[str]:
        tables = [table((None, "ring"))]
        plain, placing = (SelectedAllReduce(each, tables, ["here"] * 3) for each in (comm, Faulty(comm, seed=0)))
        free = plain.allocate(10, torch.float32, torch.device("cpu"))  # ordinary memory
        placed = placing.allocate(10, torch.float32, torch.device("cpu"))  # a transport with an allocate() of its own
        elsewhere = torch.empty(10, device="meta")  # any device but the CPU: no GPU is at hand
        selected = [placing.algorithm_for(t) for t in (placed, placed[:5], elsewhere, free)]
        return [plain.algorithm_for(free), *selected]

    assert run_ranks(3, names) == [["ring", "native", "native", "native", "ring"]] * 3


def reduce_bucket_in_shared_memory() -> list[str]:
    comm = SelectedAllReduce(
        connect("shm", timeout_s=20), [table((None, "ring"), world_size=2, transport="shm")], ["here"] * 2
    )
    bucket = comm.allocate(1000, torch.float32, torch.device("cpu"))
    for t in (bucket, other := torch.zeros(1000)):
        t.fill_(1.0)
        comm.all_reduce(t).wait()
        assert torch.equal(t, torch.full((1000,), 2.0))
    return [comm.algorithm_for(bucket), comm.algorithm_for(other)]


def test_algorithm_for_is_native_for_buckets_in_shared_memory() -> None:
    assert run_processes(2, reduce_bucket_in_shared_memory) == [["native", "ring"]] * 2


# -- from times to rules ----------------------------------------------------------------------------------------------


def test_winner_is_native_unless_another_is_clearly_faster() -> None:
    assert winner({"native": 1.0, "ring": 0.92}) == "native"
    assert winner({"native": 1.0, "ring": 0.9}) == "ring"


def test_rules_from_joins_sizes_with_the_same_winner() -> None:
    slow, fast = {"native": 1.0, "tree": 2.0}, {"native": 2.0, "tree": 1.0}
    assert rules_from({4: fast, 16: fast, 64: slow}) == ((32, "tree"), (None, "native"))
    assert rules_from({4: slow}) == ((None, "native"),)
    assert rules_from({4: slow, 16: fast, 64: slow}) == ((8, "native"), (32, "tree"), (None, "native"))


def test_measure_gives_the_same_times_on_all_ranks() -> None:
    ticks: list[int] = []

    def seconds(comm: Communicator) -> dict[str, float]:
        selected = SelectedAllReduce(comm, [], ["here"] * 2)
        return measure(selected, 4096, rounds=3, on_round=lambda: ticks.append(comm.rank))

    one, other = run_ranks(2, seconds)
    assert one == other
    assert all(value > 0 for value in one.values())
    assert sorted(ticks) == [0] * 4 + [1] * 4
