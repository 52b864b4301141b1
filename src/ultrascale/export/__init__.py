"""Plans for other engines and for launchers, and other engines' files read back as plans. No torch.

`export.write` turns a plan into files; `export.read` turns a file into a plan. What an engine cannot say stands in comment
lines of its own file, so that a plan comes back as it went.
"""
