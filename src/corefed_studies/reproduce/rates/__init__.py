"""The study of rates: the error of personal posteriors against the number of points.

study.py              what is trained and measured: `corefed reproduce rates`
posterior_errors.py   how far the posteriors of a run are from the truth, which is known here
yardstick.py          what a Gaussian process of the right smoothness reaches on the same data
slopes.py             slopes in n and n_k with intervals, as tables
picture.py            error against n and n_k
"""
