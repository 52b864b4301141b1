"""Plans for other engines and for launchers, and other engines' files read back as plans. No torch.

`export.write` turns a plan into files; `export.read` turns a file into a plan. Each engine is a table of settings (table.py).
Fields without a setting stand in comment lines of the engine's file, so that a plan is read back as it was written.
"""
