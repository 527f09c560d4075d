"""The field's leaders beside ours, on published settings and on our own, tuned with equal budgets.

settings.py    the settings: data, split, network, length, and what is judged
rows.py        the methods that are compared, most telling first
published.py   figures that others published, with their source
tuning.py      the search: the same number of candidates for every method, on validation points
points.py      the data of a setting, read once per process
cells.py       one cell is a method on a setting: tuned, then trained with the seeds that are shown
running.py     cells side by side until the time is over; a later call goes on
results.py     one line per part of a cell, and the result file made of them
report.py      the tables of docs/leaders-study.md
study.py       the commands `corefed reproduce pfllib`, `niid-bench`, `own-problems`, `cifar10`

`python -m corefed_studies.leaders` trains with torch and numpy alone.
"""
