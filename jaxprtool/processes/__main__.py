"""`python -m jaxprtool.processes FOLDER`: a process that is called; see `calls`."""

import sys

from jaxprtool.processes.calls import serve

if __name__ == "__main__":
    serve(sys.argv[1])
