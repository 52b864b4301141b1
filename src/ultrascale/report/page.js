// Of every report: draws its charts and switches the theme. page.py sets THEMES and GRID before it.
const root = document.documentElement;
const charts = [...document.querySelectorAll('.chart')];
for (const chart of charts) {
  const figure = JSON.parse(document.getElementById(chart.dataset.figure).textContent);
  Plotly.newPlot(chart, figure.data, figure.layout, {responsive: true, displaylogo: false});
}
function paint(theme) {
  root.dataset.theme = theme;
  const colours = THEMES[theme];
  for (const chart of charts) {
    const change = {...colours};
    for (const name of Object.keys(chart.layout))
      if (/^[xy]axis[0-9]*$/.test(name)) for (const part of ['gridcolor', 'zerolinecolor', 'linecolor'])
        change[name + '.' + part] = GRID[theme];
    Plotly.relayout(chart, change);
  }
}
const wish = matchMedia('(prefers-color-scheme: dark)');
let chosen = wish.matches ? 'dark' : 'light';
document.querySelector('button').onclick = () => paint(chosen = chosen === 'dark' ? 'light' : 'dark');
addEventListener('beforeprint', () => paint('light'));
addEventListener('afterprint', () => paint(chosen));
paint(chosen);
