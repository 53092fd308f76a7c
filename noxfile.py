"""The tasks of development, in the environment that is active: `nox -l` lists them."""

from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["quick"]

BENCHMARKS = Path(__file__).parent / "tests" / "benchmarks"


@nox.session
def quick(session):
    """Lint, format, types, the rules of the house, and the tests that are named, without proofs."""
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    tests = ("tests/test_architecture.py", *session.posargs)
    session.run("pytest", "-n", "0", "-m", "not proof and not sweep and not models", *tests)


@nox.session
def proofs(session):
    """Run all tests but the exhaustive ones, the proofs too."""
    session.run("pytest", "--all", *session.posargs)


@nox.session
def sweep(session):
    """Run a share of the exhaustive tests."""
    session.run("python", "-m", "tests.sweep", *session.posargs)


@nox.session
def models(session):
    """Run every command on real models."""
    session.run("pytest", "-m", "models", *session.posargs)


@nox.session
def bench(session):
    """Run the benchmarks that are named, or all, beside JAX."""
    names = session.posargs or [path.stem[6:] for path in sorted(BENCHMARKS.glob("bench_*.py"))]
    for name in names:
        session.run("python", str(BENCHMARKS / f"bench_{name}.py"))


@nox.session
def docs(session):
    """Write the pages that are made from code, and run what all pages show."""
    session.run("python", "-m", "tests.documentation.json_page")
    session.run("python", "-m", "tests.documentation.lint_page")
    session.run("python", "-m", "tests.documentation.picture")
    session.run("pytest", "tests/documentation", *session.posargs)


@nox.session
def site(session):
    """Build the site of the documentation in build/site."""
    session.run("python", "-m", "sphinx", "-a", "-W", "--keep-going", "docs", "build/site")
