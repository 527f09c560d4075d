"""The structure of the project in numbers: `python -m corefed_studies.house`, or `make house`.

Counted are files, packages, imports, calls, lines, settings and the contract of a method, in this
checkout or in another one (`--src`). `probe.py` says how each number is counted, `picture.py` draws
the imports between the rooms, and `docs/architecture.md` shows both.
"""
