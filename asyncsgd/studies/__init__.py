"""A study: what it compares, the plan of its runs, the folder in which they are made, and how long they take.

Read config, arms, chain, runs and plan first: from a file to the list of runs. overlay changes a config before it is
planned. Then read study_folder, stages and runner, which make the runs. pilots, check, estimate and progress help them,
and files says what they write. config_of_arguments and from_python are the way from Python. ladder plans a study whose
plan grows; ladder_texts, naive and naive_loop belong to it.
"""
