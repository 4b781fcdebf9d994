"""Which codec each parameter gets: by name pattern; ``dense`` where compression is not worthwhile."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from torch.nn import Parameter

from gradsync import spec
from gradsync.codecs.base import Codec
from gradsync.codecs.dense import Dense

MIN_NUMEL = 4096  # smaller parameters are sent uncompressed: few bytes, and their values often matter more

CodecRule = Codec | str | Mapping[str, "Codec | str"]


@dataclass(frozen=True)
class CodecRules:
    """Name patterns with their codecs, of which the first match counts, and the size below which codecs are dense.

    Vectors (biases, the weights of norms) and parameters of fewer than ``min_numel`` values are sent dense, unless a
    pattern other than ``"*"`` matches them.

    >>> import torch
    >>> from gradsync.reducers.codec_rules import CodecRules
    >>> rules = CodecRules.parse({"head.*": "fp16", "*": "int8"}, min_numel=100)
    >>> weight, bias = torch.nn.Parameter(torch.zeros(20, 20)), torch.nn.Parameter(torch.zeros(20))
    >>> rules.codec_of("body.weight", weight), rules.codec_of("body.bias", bias)
    (Int8(...), Dense())
    >>> rules.codec_of("head.bias", bias)
    Fp16()
    """

    patterns: tuple[tuple[str, Codec], ...]
    min_numel: int = MIN_NUMEL

    @classmethod
    def parse(cls, rule: CodecRule, *, min_numel: int = MIN_NUMEL) -> CodecRules:
        """From one codec for all parameters, or a mapping of name patterns to codecs."""
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
        return Dense()  # no pattern matches

    def check(self, names: list[str]) -> None:
        """Raise if a pattern fits no parameter: most likely it is misspelt."""
        for pattern, _ in self.patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                shown = ", ".join(sorted(names)[:5])
                raise ValueError(f"codec pattern {pattern!r} fits no parameter; the model has {shown}, ...")

    def as_argument(self) -> Codec | dict[str, Codec]:
        """The ``codec`` argument from which these rules would be parsed, for specs."""
        if len(self.patterns) == 1 and self.patterns[0][0] == "*":
            return self.patterns[0][1]
        return dict(self.patterns)
