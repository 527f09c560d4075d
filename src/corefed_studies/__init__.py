"""The experiments behind the documentation: tables, figures, theory, benchmarks.

May import all of corefed; nothing in corefed imports it. It is not in the wheel.
"""
