"""The ``gradsync`` command. Apart from comm's rendezvous, the only code that reads os.environ.

``main`` is the entry point, and each command has a file of its name. ``environment`` measures the network for
``profile`` and asks the advisor, ``profile_view`` prints a profile, ``terminal`` holds what commands share, and
``launch/`` starts and supervises the workers of ``run``.
"""
