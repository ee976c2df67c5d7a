"""A study: what it compares, the plan of its runs, the folder in which they are made, and how long they take.

Read config, arms, chain, runs and plan first: from a file to the list of runs. Then study_folder, stages and runner,
which make them, with pilots, check, estimate and progress beside them. config_of_arguments and from_python are the way
from Python, ladder and the files behind it a study whose plan grows.
"""
