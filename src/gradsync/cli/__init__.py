"""The command line: ``gradsync run`` and ``gradsync info``. Reads os.environ, as only comm's rendezvous does beside it.

``main`` is the entry point and each command has a file. ``run`` reads the options, ``agent`` starts and watches the
workers, ``worker`` is what each of them runs, ``signals`` is how a worker ends, ``failures`` is what it leaves behind.
"""
