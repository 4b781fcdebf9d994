"""PowerSGD: sends low-rank factors of gradients. ``reducer`` is the algorithm, ``lowrank`` its linear algebra."""
