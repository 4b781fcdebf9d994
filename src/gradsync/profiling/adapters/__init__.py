"""Where records of steps can go while a training runs: a small file for each place. Each is given to ``on_step``.

None of them is imported before it is asked for, and none brings a package along.
"""
