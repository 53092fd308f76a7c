"""The exhaustive tests, as one command.

    python -m tests.sweep                       # a random share of each part
    python -m tests.sweep --share 1             # everything
    python -m tests.sweep --only unzip --jobs 1
    python -m tests.sweep --only "dce: harnesses" --program sin_shape=float32

A part is either a proof over a corpus of programs (a `Part` in the list `SWEEP` of a test module)
or the tests of one file that are marked `sweep`. Results are saved in a file, so that an
interrupted run continues where it stopped.
"""
