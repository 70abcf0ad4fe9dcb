"""A hostile tester: programs that try to break the library for as long as you let them.

    python -m tests.soak --seconds 3600 --seed 0 --out results/soak.json

Each program is a stream of numbered cases. A case is a function of the seed and its number, so a
failure prints the command that repeats it. `make test` runs the first cases of every program.
"""
