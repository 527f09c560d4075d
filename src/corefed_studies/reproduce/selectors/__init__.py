"""The study of selectors: ways to choose a coreset, compared by what is trained on it.

    study.py        what is trained: problems, fractions, selectors, seeds
    variations.py   variations of the default selector, one setting at a time
    runs.py         from run folders to a small result file
    verdicts.py     paired differences, counts of them, costs to a target
    aims.py         what the study set out to show, and whether it does
    report.py       the tables as a page
    picture.py      one picture per problem

`corefed bench selectors` (`corefed_studies/bench/selectors.py`) runs it.
"""
