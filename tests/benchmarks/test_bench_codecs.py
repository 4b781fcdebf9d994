"""bench_codecs: a short run, the plain versions agree with the codecs, and known times give known speeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.bench_codecs import PLAIN, main, summarize
from gradsync import spec
from gradsync.codecs import Payload, Residual


def test_bench_codecs_writes_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    asked = ["--codecs", "int8; fp16", "--modes", "ours,eager", "--size", "64KB", "--rounds", "3"]
    try:
        main([*asked, "--output", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    shown = capsys.readouterr().out
    for expected in ("memcpy", "int8", "fp16", "1 : 3.9", "eager"):
        assert expected in shown
    (written,) = tmp_path.glob("*-codecs.json")
    report = json.loads(written.read_text())
    assert set(report["measured"]) == {"memcpy", "int8", "fp16"}
    assert len(report["measured"]["int8"]["eager"]["encode_s"]) == 3
    assert report["summary"]["int8"]["ours"]["times_as_fast_as_eager"]["num_pairs"] == 3


@pytest.mark.parametrize("text", PLAIN)
def test_bench_codecs_plain_versions_agree_with_the_codecs(text: str) -> None:
    codec, (encode, decode) = spec.parse(text, kind="codec"), PLAIN[text]
    x = torch.randn(8192, generator=torch.Generator().manual_seed(0))
    before = 0.1 * x.flip(0)
    *parts, after = encode(x, before)
    payload, left, out = Payload(torch.empty(codec.encoded_bytes(8192), dtype=torch.uint8)), before.clone(), x.clone()
    codec.encode(x, payload, residual=Residual(left, left))
    codec.decode(payload, out)
    plain = decode(*parts)
    torch.testing.assert_close(plain + after, x + before)
    # topk takes a sample and sends a little less than asked for
    different = (plain - out).abs() > 1e-5 * out.abs().max()
    assert different.double().mean() < (0.003 if "topk" in text else 1e-4)


def test_bench_codecs_speeds_are_sizes_over_medians() -> None:
    taken = {
        "ours": {"encode_s": [0.5, 1.0, 1.5], "decode_s": [1.0, 1.0, 1.0]},
        "eager": {"encode_s": [5.0, 8.0, 11.0], "decode_s": [1.0, 2.0, 4.0]},
    }
    row = summarize({"int8": taken}, 4_000_000_000)["int8"]
    assert row["ours"]["encode_gb_per_s"] == pytest.approx(4)
    assert row["ours"]["both_gb_per_s"] == pytest.approx(2)
    assert row["eager"]["decode_gb_per_s"] == pytest.approx(2)
    assert row["ours"]["times_as_fast_as_eager"]["ratio"] == pytest.approx((4 * 5 * 6) ** (1 / 3))
