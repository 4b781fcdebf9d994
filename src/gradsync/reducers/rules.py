"""Which codec each parameter gets: by the name's pattern, and dense where compressing can't pay."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from torch.nn import Parameter

from gradsync import spec
from gradsync.codecs.base import Codec
from gradsync.codecs.dense import Dense

MIN_NUMEL = 4096  # a parameter below this is sent whole: its bytes do not count, and its values often do

CodecRule = Codec | str | Mapping[str, "Codec | str"]


@dataclass(frozen=True)
class Rules:
    """Patterns of names with their codecs, the first that matches counts; and what is dense whatever they say.

    Vectors (biases, the weights of norms) and parameters of fewer than ``min_numel`` values go dense, unless a pattern
    other than ``"*"`` names them.

    >>> import torch
    >>> from gradsync.reducers.rules import Rules
    >>> rules = Rules.read({"head.*": "fp16", "*": "int8"}, min_numel=100)
    >>> weight, bias = torch.nn.Parameter(torch.zeros(20, 20)), torch.nn.Parameter(torch.zeros(20))
    >>> rules.codec_of("body.weight", weight), rules.codec_of("body.bias", bias)
    (Int8(...), Dense())
    >>> rules.codec_of("head.bias", bias)
    Fp16()
    """

    patterns: tuple[tuple[str, Codec], ...]
    min_numel: int = MIN_NUMEL

    @classmethod
    def read(cls, rule: CodecRule, *, min_numel: int = MIN_NUMEL) -> Rules:
        """Take a codec for all parameters, or one for each pattern of names."""
        if min_numel < 0:
            raise ValueError(f"min_numel is a number of values, 0 or more; got {min_numel=}.")
        if not isinstance(rule, Mapping):
            rule = {"*": rule}
        if not rule:
            raise ValueError("codec={} names no codec. Give one for all the rest: {'*': 'int8'}.")
        return cls(tuple((pattern, spec.resolve(codec, "codec")) for pattern, codec in rule.items()), min_numel)

    def codec_of(self, name: str, param: Parameter) -> Codec:
        for pattern, codec in self.patterns:
            if fnmatch.fnmatchcase(name, pattern):
                small = param.dim() < 2 or param.numel() < self.min_numel
                return Dense() if small and pattern == "*" else codec
        return Dense()  # no pattern speaks of it

    def check(self, names: list[str]) -> None:
        """Refuse a pattern that fits no parameter: most likely it is misspelt."""
        for pattern, _ in self.patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                shown = ", ".join(sorted(names)[:5])
                raise ValueError(f"codec pattern {pattern!r} fits no parameter; the model has {shown}, ...")

    def written(self) -> Codec | dict[str, Codec]:
        """As the user would write it."""
        if len(self.patterns) == 1 and self.patterns[0][0] == "*":
            return self.patterns[0][1]
        return dict(self.patterns)
