"""Measure the time of `precision`, and the programs it runs, for some tolerances."""

import time

import jaxprtool

#: The tolerances, both absolute and relative.
TOLERANCES = (1e-2, 1e-3, 1e-4)


def main():
    program = jaxprtool.load("samples/transformer.py:loss")
    print("tolerance   seconds   programs   kept")
    for tolerance in TOLERANCES:
        start = time.perf_counter()
        found = jaxprtool.precision(program, rtol=tolerance, atol=tolerance)
        seconds = time.perf_counter() - start
        kept = f"{len(found.kept)} of {found.places}"
        print(f"{tolerance:9g} {seconds:9.1f} {found.runs:10} {kept:>10}")


if __name__ == "__main__":
    main()
