"""The problems that default settings are chosen on, and those that they are judged on.

problems.py   the list: data, split and length of every problem, and its role
tables.py     CSV files of public tables
features.py   images as features of a frozen network
files.py      a file that is made once, and checked where it is found again
prepare.py    all files of the problems, in one folder
"""
