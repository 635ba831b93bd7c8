"""The questions that `tests/record.py` records, by subject, and their answers as numbers.

`api` holds the only calls of fewbit, `leaves` turns answers into what is compared, `models` builds models without fewbit;
every other module yields the entries of one subject.
"""
