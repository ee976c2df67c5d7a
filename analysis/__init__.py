"""Tables, pictures and verdicts from run folders. Importing them imports neither torch nor transformers.

Two functions import torch when they are called: `dose_response.addition`, which asks the virtual clock, and
`meanings.meanings_in_runs`, which reads rules that differ in their text.

How is a folder of runs read?               read.py, run_files.py, places.py, runs.py
What was planned and registered?            questions.py
May two runs be compared?                   gate.py, meanings.py
Which runs are a pair, and in what?         pairs.py, measure.py, scores.py, curves.py
Which questions are asked?                   judge.py, differences.py
Which test, and which word?                 stats.py, answers.py
What is said of it, and how far to trust?   verdict.py, trust.py
How is it shown?                            tables.py, plots.py, forest.py, gallery.py, page.py
What has a special report besides?          special.py, comparisons.py, comparison_sections.py, comparison_report.py,
                                            ways.py, dose.py, dose_response.py, lab_notes.py, lab_notes_rows.py,
                                            ladder.py, ladder_sections.py
A study from Python                         load.py
One file a command: compare, report, tasks, lab_notes, timeline, watch, candidates, language_model, parallelism,
speed_ladder; what they share is in commands.py. crossing.py is used by dose_response.py alone, over_tasks.py by
tasks.py alone.

Words. An arm is an algorithm under one condition, and its runs differ by their seeds. A treatment is an arm that is
compared with another one, the reference. Arms of a group share task, workers, clock, speeds and batch size.
The runs of both arms with one seed are a pair. An endpoint is what is compared, such as the loss at equal samples.
"""
