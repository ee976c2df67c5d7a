"""Tables, pictures and verdicts from run folders. Never imports torch or transformers.

Which interval, which test, which power?    statistics/
Which run is what in a study?               study/
What does the study show?                   findings/
How is it drawn and written?                report/
A table of runs, and their loss curves      compare.py
The lab notes' table                        lab_notes.py
Several studies together                    tasks.py
How every command ends                      commands.py
"""
