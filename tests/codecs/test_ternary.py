"""ternary: -1, 0 or 1 times the largest magnitude of a block, with a probability proportional to the value."""

from __future__ import annotations

import torch

from gradsync.codecs import Payload, Ternary


def test_decoded_has_three_values_and_always_the_largest() -> None:
    codec, x = Ternary(), torch.linspace(-1, 1, 1024)
    payload = Payload(torch.empty(codec.encoded_bytes(1024), dtype=torch.uint8))
    for key in range(10):
        out = torch.empty_like(x)
        codec.encode(x, payload, key=key)
        codec.decode(payload, out)
        for values, values_out in zip(x.split(256), out.split(256), strict=True):
            largest = values.abs().max()
            assert set((values_out / largest).unique().tolist()) <= {-1.0, 0.0, 1.0}
            assert values_out[values.abs().argmax()].abs() == largest
            assert (values_out * values >= 0).all()


def test_frequency_is_proportional_to_magnitude() -> None:
    codec, x = Ternary(), torch.tensor([1.0, 0.75, -0.25, 0.0])
    payload = Payload(torch.empty(codec.encoded_bytes(4), dtype=torch.uint8))
    count = torch.zeros(4)
    for key in range(2000):
        codec.encode(x, payload, key=key)
        codec.decode(payload, count, add=True)
    torch.testing.assert_close(count / 2000, x, atol=0.05, rtol=0)
    assert count[0] == 2000
    assert count[3] == 0
