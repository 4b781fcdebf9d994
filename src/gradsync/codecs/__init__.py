"""All codecs: a flat tensor to the bytes that are sent, and back. Importing this registers their names for specs."""

from gradsync.codecs.base import Codec, Payload, Residual
from gradsync.codecs.cast import Bf16, Fp16
from gradsync.codecs.chain import Chain
from gradsync.codecs.dense import Dense
from gradsync.codecs.dgc import Dgc
from gradsync.codecs.quantize import Int4, Int8
from gradsync.codecs.randomk import RandomK
from gradsync.codecs.sign import Sign
from gradsync.codecs.ternary import Ternary
from gradsync.codecs.topk import TopK

__all__ = [
    "Bf16",
    "Chain",
    "Codec",
    "Dense",
    "Dgc",
    "Fp16",
    "Int4",
    "Int8",
    "Payload",
    "RandomK",
    "Residual",
    "Sign",
    "Ternary",
    "TopK",
]
