"""The experiments behind the documentation: tables, figures, theory, benchmarks.

May import all of corefed; nothing in corefed imports it. It is not in the wheel.

    commands.py   `corefed bench`, `reproduce` and `theory`
    bench/        speed, memory and quality, measured on this machine
    reproduce/    the tables and figures of the paper, and studies of our own
    theory/       the paper's bounds and rates as functions, and which statements hold
    defaults/     the problems that defaults are chosen on, and those that they are judged on
    data/         data sets that only the studies read
"""
