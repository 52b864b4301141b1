// The picture of the cluster: nodes × GPUs, and along one axis the group of the GPU that is pointed at.
window.ultrascaleCluster = (() => {
  const GAP = 10, PAD = 4, LABEL = 14;

  function members(axis, rank) {
    const first = rank - Math.floor(rank / axis.stride) % axis.size * axis.stride;
    return Array.from({length: axis.size}, (_, place) => first + place * axis.stride);
  }

  function draw(id, data) {
    const root = document.getElementById(id);
    if (!root) return;
    const chosen = data.axes.findIndex(axis => axis.name === root.axisName);
    const state = {data, axis: Math.max(0, chosen), rank: Math.min(root.rank || 0, data.shown - 1)};
    const buttons = data.axes.map((axis, number) =>
      `<button type="button" data-axis="${number}"><b>${axis.label}</b><small>${axis.short}</small></button>`);
    root.innerHTML = `<div class="us-axes">${buttons.join("")}</div><div class="us-map"></div><div class="us-said"></div>`;
    root.state = state;
    place(root);
    root.onpointerover = root.onclick = event => {
      const button = event.target.closest("[data-axis]"), gpu = event.target.closest("[data-rank]");
      if (button) { state.axis = Number(button.dataset.axis); root.axisName = data.axes[state.axis].name; }
      else if (gpu) { state.rank = root.rank = Number(gpu.dataset.rank); }
      else return;
      mark(root);
    };
    if (!root.observer) {
      root.observer = new ResizeObserver(() => root.state && place(root));
      root.observer.observe(root);
    }
  }

  function place(root) {
    const {data} = root.state, {cell, columns, per_node, shown} = data;
    const nodes = Math.ceil(shown / per_node), rows = Math.ceil(per_node / columns);
    const width = columns * cell + 2 * PAD, height = rows * cell + 2 * PAD + LABEL;
    const across = Math.max(1, Math.min(nodes, Math.floor((root.clientWidth + GAP) / (width + GAP))));
    if (root.state.across === across) return;
    root.state.across = across;
    const parts = [], middles = [];
    for (let node = 0; node < nodes; node++) {
      const left = node % across * (width + GAP), top = Math.floor(node / across) * (height + GAP);
      parts.push(`<text x="${left}" y="${top + 10}">${width < 44 ? node : "node " + node}</text>`);
      parts.push(`<rect class="node" x="${left + .5}" y="${top + LABEL}" width="${width - 1}" height="${height - LABEL}" rx="3"/>`);
      for (let gpu = 0; gpu < per_node && node * per_node + gpu < shown; gpu++) {
        const x = left + PAD + gpu % columns * cell, y = top + LABEL + PAD + Math.floor(gpu / columns) * cell;
        middles.push([x + cell / 2, y + cell / 2]);
        const rank = node * per_node + gpu, side = cell > 6 ? cell - 2 : cell - 1;
        parts.push(`<rect class="gpu" data-rank="${rank}" x="${x + 1}" y="${y + 1}" width="${side}" height="${side}" rx="2"/>`);
      }
    }
    const down = Math.ceil(nodes / across);
    root.state.middles = middles;
    root.querySelector(".us-map").innerHTML = `<svg role="img" aria-label="GPUs by node" width="${across * (width + GAP) - GAP}" ` +
      `height="${down * (height + GAP)}">${parts.join("")}<g class="links"></g></svg>`;
    mark(root);
  }

  function mark(root) {
    const {data, rank, middles} = root.state, axis = data.axes[root.state.axis];
    root.querySelectorAll("[data-axis]").forEach((button, number) => button.setAttribute("aria-pressed", number === root.state.axis));
    if (!axis) return;
    const group = members(axis, rank), inside = new Set(group);
    root.querySelectorAll(".gpu").forEach((gpu, other) => {
      const number = Math.floor(other / (axis.stride * axis.size)) * axis.stride + other % axis.stride;
      gpu.classList.toggle("odd", number % 2 === 1);
      gpu.classList.toggle("mine", inside.has(other));
      gpu.classList.toggle("me", other === rank);
    });
    const ring = axis.ring && group.length > 2 ? [...group, group[0]] : group, links = [];
    for (let step = 1; step < ring.length && ring.length <= 129; step++) {
      const [one, other] = [ring[step - 1], ring[step]];
      if (!middles[one] || !middles[other]) continue;
      const near = Math.floor(one / data.domain) === Math.floor(other / data.domain);
      links.push(`<path class="link ${near ? "" : "network"}" d="M${middles[one]} L${middles[other]}"/>`);
    }
    root.querySelector(".links").innerHTML = links.join("");
    const listed = group.length <= 8 ? group.join(", ") : `${group.slice(0, 4).join(", ")}, … ${group[group.length - 1]}`;
    root.querySelector(".us-said").innerHTML =
      `<b>GPU ${rank}</b> on node ${Math.floor(rank / data.per_node)}: its <b>${axis.label}</b> group is GPUs ${listed}. ` +
      `${axis.where}<br>${axis.sends}`;
  }

  return {draw};
})();
