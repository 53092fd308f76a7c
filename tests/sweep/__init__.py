"""The exhaustive tests, as one command.

    python -m tests.sweep                       # a share of each part, drawn by a seed
    python -m tests.sweep --share 1             # the whole
    python -m tests.sweep --only unzip --jobs 1
    python -m tests.sweep --only "dce: harnesses" --program sin_shape=float32

A part is either a proof over a corpus of programs (a `Part` in the list `SWEEP` of a test module)
or the tests of one file that are marked `sweep`. What has run is kept in a file, so that a run
that was stopped goes on where it was.
"""
