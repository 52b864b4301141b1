"""One function per picture; report, studio and notebooks draw with the same ones. Each returns a Plotly figure.

Colours are Okabe and Ito's, which people with any colour vision tell apart; `style.themed(figure, "dark")` turns one dark.
"""
