"""One function per figure, for report, studio and notebooks; each returns a Plotly figure.

Colours are Okabe and Ito's, for any colour vision; `style.themed(figure, "dark")` turns one dark.
"""
