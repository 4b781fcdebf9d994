"""How ``gradsync run`` starts, supervises and ends workers, and what each worker process runs.

``agent`` starts and supervises the workers of this node. ``worker`` is the main program of each worker,
``worker_signals`` its signal handling, ``failures`` the files by which it reports a failure to the launcher.
``elastic_agent`` supervises the workers of an elastic run: ``elastic_options`` reads its options, ``elastic_store`` is
its launchers' side of the run's store, ``process`` one worker's process, ``chaos`` the faults of ``--chaos``.
``servers`` runs parameter servers beside them, ``capacity`` warns of too many workers, ``relaunch`` runs a measuring
command in workers.
"""
