"""`report.html`: a plan or a run as one page that needs nothing else: no network, no other file; and prints well."""
