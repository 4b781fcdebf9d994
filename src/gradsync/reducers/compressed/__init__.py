"""The compressed reducer: compensate, encode, exchange, decode.

``reducer`` holds ``Compressed`` and the exchange of payloads; ``feedback`` encodes and keeps residuals; ``shards`` cuts
a bucket into shards; ``rows`` holds the send and receive buffers of a bucket; ``zero_blocks`` shortens rows;
``small_parameters`` are sent uncompressed.
"""
