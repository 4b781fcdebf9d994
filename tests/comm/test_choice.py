"""The tables of measured algorithms: their file, what is wrong with it, whose table holds, and what they decide."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.comm import Communicator, run_ranks
from gradsync.comm.choice import (
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
from gradsync.comm.chosen import Chosen, choose
from gradsync.comm.connect import connect
from gradsync.comm.faulty import Faulty
from gradsync.comm.timing import measure, rules_from, winner
from tests.ranks import run_processes

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


def test_a_table_is_found_again_and_replaces_only_its_like(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "tables.json"
    others = [table(world_size=4), table(transport="c10d"), table(machine=ELSEWHERE)]
    for each in [table((None, "direct")), *others, table()]:
        save_table(path, each)
    assert load_tables(path) == [*others, table()]
    assert [file.name for file in path.parent.iterdir()] == ["tables.json"], "nothing is left beside it"


def test_a_file_that_is_not_there_is_no_table(tmp_path: Path) -> None:
    assert load_if_there(tmp_path / "none.json") == []
    with pytest.raises(FileNotFoundError):
        load_tables(tmp_path / "none.json")


def test_the_users_own_file_and_one_that_is_named() -> None:
    assert table_file({}) == TableFile(Path.home() / ".config/gradsync/collectives.json")
    assert table_file({"XDG_CONFIG_HOME": "/x"}) == TableFile(Path("/x/gradsync/collectives.json"))
    assert table_file({"XDG_CONFIG_HOME": "/x", "GRADSYNC_COLLECTIVES": "/a.json"}) == TableFile(Path("/a.json"), True)


def wrong(**changes: Any) -> dict[str, Any]:
    return {"format": 1, "tables": [{**table().as_json(), **changes}]}


@pytest.mark.parametrize(
    ("content", "said"),
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
        (wrong(rules=[[None]]), "tables[0].rules[0] must be [up to so many bytes, algorithm]; got [None]"),
        (wrong(rules=[[None, "rings"]]), "tables[0].rules[0][1] must be one of native, ring, halving"),
        (wrong(rules=[[10, "ring"]]), "tables[0].rules[0][0] must be null, since it is the last"),
        (wrong(rules=[[10, "ring"], [10, "tree"], [None, "ring"]]), "rules[1][0] must be a number of bytes above 10"),
        (wrong(rules=[["10", "ring"], [None, "ring"]]), "rules[0][0] must be a number of bytes above -1"),
        ({"format": 1, "tables": 2 * wrong()["tables"]}, "tables[1] must be for a group and machine that no other"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_name(tmp_path: Path, content: Any, said: str) -> None:
    path = tmp_path / "tables.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load_tables(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "run `gradsync tune-comm` again" in str(error.value)


# -- what holds -------------------------------------------------------------------------------------------------------


def sized(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def test_every_rank_takes_rank_0s_table_whatever_its_own_file_says(tmp_path: Path) -> None:
    save_table(tmp_path / "0.json", table())
    save_table(tmp_path / "1.json", table((None, "halving")))  # and rank 2 has none

    def names(comm: Communicator) -> list[str]:
        chosen = choose(comm, TableFile(tmp_path / f"{comm.rank}.json"))
        assert isinstance(chosen, Chosen)
        t = torch.ones(200)
        chosen.all_reduce(t).wait()
        assert torch.equal(t, torch.full((200,), 3.0))
        return [chosen.algorithm_for(sized(size)) for size in (0, 100, 101, 1000, 1001)]

    assert run_ranks(3, names) == [["tree", "tree", "ring", "ring", "native"]] * 3


def test_a_file_that_rank_0_cant_read_is_everybodys_error(tmp_path: Path) -> None:
    (tmp_path / "tables.json").write_text("nonsense")
    told: list[str] = []

    def names(comm: Communicator) -> None:
        with pytest.raises(ValueError) as error:
            choose(comm, TableFile(tmp_path / "tables.json" if comm.rank == 0 else tmp_path / "none.json"))
        told.append(str(error.value))

    run_ranks(3, names)
    assert len(set(told)) == 1
    assert told[0].startswith(f"{tmp_path}/tables.json: Expecting value")


def test_without_a_table_the_communicator_stays_what_it_is(tmp_path: Path) -> None:
    def is_same(comm: Communicator) -> bool:
        return choose(comm, TableFile(tmp_path / "none.json")) is comm

    assert run_ranks(2, is_same) == [True, True]


def test_a_table_of_another_machine_is_left_alone_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tables.json"
    save_table(path, table(world_size=2, machine=ELSEWHERE))
    with caplog.at_level(logging.INFO, "gradsync"):
        assert run_ranks(2, lambda comm: choose(comm, TableFile(path)) is comm) == [True, True]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "measured on elsewhere (96 cores) and are not used on" in said[0]
    assert "gradsync tune-comm -n 2" in said[0]

    def takes(comm: Communicator) -> list[str]:
        chosen = choose(comm, TableFile(path, named=True))
        assert isinstance(chosen, Chosen)
        return [chosen.algorithm_for(sized(1))]

    assert run_ranks(2, takes) == [["tree"], ["tree"]], "a file that the user names holds anywhere"
    save_table(path, table((None, "doubling"), world_size=2))
    assert run_ranks(2, takes) == [["doubling"], ["doubling"]], "and this machine's own table comes first"


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*none\.json, which GRADSYNC_COLLECTIVES names"):
        run_ranks(2, lambda comm: choose(comm, TableFile(tmp_path / "none.json", named=True)))


def test_groups_have_the_table_of_their_own_size(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    for each in (table((None, "tree"), world_size=2), table((None, "ring"), world_size=3)):
        save_table(path, each)

    def names(comm: Communicator) -> list[str]:
        chosen = choose(comm, TableFile(path))
        groups = [chosen, chosen.clone(), chosen.split([2, 0]), chosen.split([1])]
        return [group.algorithm_for(sized(9)) for group in groups if isinstance(group, Chosen)]

    assert run_ranks(3, names) == [["ring", "ring", "tree"], ["ring", "ring", "native"], ["ring", "ring", "tree"]]


def test_ranks_on_two_hosts_are_another_group() -> None:
    def names(comm: Communicator) -> list[str]:
        tables = [table((None, "ring")), table((None, "tree"), world_size=2)]
        apart = Chosen(comm, tables, ["a", "a", "b"])
        pair = apart.split([0, 1])
        return [group.algorithm_for(sized(9)) for group in (apart, pair) if isinstance(group, Chosen)]

    assert run_ranks(3, names) == [["native", "tree"], ["native", "tree"], ["native"]]


def test_what_is_not_in_the_cpus_own_memory_is_the_transports() -> None:
    def names(comm: Communicator) -> list[str]:
        tables = [table((None, "ring"))]
        plain, placing = (Chosen(each, tables, ["here"] * 3) for each in (comm, Faulty(comm, seed=0)))
        free = plain.allocate(10, torch.float32, torch.device("cpu"))  # memory like any other
        placed = placing.allocate(10, torch.float32, torch.device("cpu"))  # a transport that has its own way
        elsewhere = torch.empty(10, device="meta")  # what is not "cpu" is all one here: no GPU is at hand
        chosen = [placing.algorithm_for(t) for t in (placed, placed[:5], elsewhere, free)]
        return [plain.algorithm_for(free), *chosen]

    assert run_ranks(3, names) == [["ring", "native", "native", "native", "ring"]] * 3


def bucket_in_shared_memory() -> list[str]:
    comm = Chosen(connect("shm", timeout_s=20), [table((None, "ring"), world_size=2, transport="shm")], ["here"] * 2)
    bucket = comm.allocate(1000, torch.float32, torch.device("cpu"))
    for t in (bucket, other := torch.zeros(1000)):
        t.fill_(1.0)
        comm.all_reduce(t).wait()
        assert torch.equal(t, torch.full((1000,), 2.0))
    return [comm.algorithm_for(bucket), comm.algorithm_for(other)]


def test_buckets_in_shared_memory_are_summed_where_they_lie() -> None:
    assert run_processes(2, bucket_in_shared_memory) == [["native", "ring"]] * 2


# -- from times to rules ----------------------------------------------------------------------------------------------


def test_native_stays_where_ours_is_not_clearly_faster() -> None:
    assert winner({"native": 1.0, "ring": 0.92}) == "native"
    assert winner({"native": 1.0, "ring": 0.9}) == "ring"


def test_sizes_with_the_same_winner_share_a_rule() -> None:
    slow, fast = {"native": 1.0, "tree": 2.0}, {"native": 2.0, "tree": 1.0}
    assert rules_from({4: fast, 16: fast, 64: slow}) == ((32, "tree"), (None, "native"))
    assert rules_from({4: slow}) == ((None, "native"),)
    assert rules_from({4: slow, 16: fast, 64: slow}) == ((8, "native"), (32, "tree"), (None, "native"))


def test_all_ranks_measure_the_same() -> None:
    ticks: list[int] = []

    def seconds(comm: Communicator) -> dict[str, float]:
        chosen = Chosen(comm, [], ["here"] * 2)
        return measure(chosen, 4096, rounds=3, on_round=lambda: ticks.append(comm.rank))

    one, other = run_ranks(2, seconds)
    assert one == other
    assert all(value > 0 for value in one.values())
    assert sorted(ticks) == [0] * 4 + [1] * 4
