// The curves (by uPlot) and the notes at the pointer. Everything else on the page works without a script.
"use strict";
(() => {
  const KINDS = ["weights", "optimizer", "activations", "gradients", "received", "temporary"];
  const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  const style = getComputedStyle(document.documentElement);
  const colour = name => style.getPropertyValue("--" + name).trim();
  const bytes = n => {
    const unit = UNITS.find(([, factor]) => n >= factor);
    return unit ? (n / unit[1]).toFixed(2) + " " + unit[0] : n + " B";
  };
  const seconds = s => s >= 1 ? s.toFixed(2) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(2) + " ms" : (s * 1e6).toFixed(2) + " us";

  const tip = document.getElementById("tip");
  function show(text, event) {
    tip.textContent = text;
    tip.hidden = !text;
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    const above = event.clientY - tip.offsetHeight - 12;
    tip.style.top = (above > 4 ? above : event.clientY + 18) + "px";
  }
  for (const kind of ["pointermove", "pointerdown"]) {
    addEventListener(kind, event => {
      if (!event.target.closest?.(".u-over")) show(event.target.closest?.("[data-tip]")?.dataset.tip ?? "", event);
    });
  }

  const plots = [];
  function draw(element, curve, all, lane) {
    const {x, end, timed, names} = curve;
    const total = x.map(() => 0);
    const stacks = KINDS.map(kind => (curve.kinds[kind] ?? x.map(() => 0)).map((n, i) => total[i] += n));
    const most = Math.max(...all.map(c => Math.max(c.peak.bytes, c.room ?? 0))) * 1.05;
    const tick = 2 ** Math.ceil(Math.log2(most / 4.5));
    const axis = {stroke: () => colour("dim"), font: "11px system-ui, sans-serif", grid: {stroke: () => colour("line"), width: 1}, ticks: {show: false}};
    const at = s => !timed ? s : !s ? "0" : end >= 1 ? +s.toPrecision(4) + " s" : +(s * 1e3).toPrecision(4) + " ms";

    function mark(u) {
      const g = u.ctx, r = devicePixelRatio, {left, top, width} = u.bbox;
      g.save();
      g.strokeStyle = g.fillStyle = colour("ink");
      if (curve.room != null) {
        const y = u.valToPos(curve.room, "y", true);
        g.lineWidth = 1.5 * r;
        g.setLineDash([5 * r, 4 * r]);
        g.beginPath(); g.moveTo(left, y); g.lineTo(left + width, y); g.stroke();
        g.setLineDash([]);
      }
      const px = u.valToPos(curve.peak.at, "x", true), py = u.valToPos(curve.peak.bytes, "y", true);
      if (px >= left && px <= left + width) {
        const right = px > left + width * .6, label = "peak " + bytes(curve.peak.bytes);
        const place = [px + (right ? -8 : 8) * r, Math.max(py - 6 * r, top + 12 * r)];
        g.strokeStyle = colour("bg");
        g.beginPath(); g.arc(px, py, 4 * r, 0, 7); g.fill(); g.stroke();
        g.font = `600 ${12 * r}px system-ui, sans-serif`;
        g.textAlign = right ? "right" : "left";
        g.lineWidth = 4 * r;
        g.lineJoin = "round";
        g.strokeText(label, ...place); g.fillText(label, ...place);
      }
      g.restore();
    }

    const plot = new uPlot({
      width: element.clientWidth, height: element.clientHeight, legend: {show: false},
      cursor: {sync: {key: "step"}, points: {show: false}, drag: {x: true, y: false}},
      scales: {x: {time: false, range: (u, from, to) => [from ?? 0, to ?? end]}, y: {range: [0, most]}},
      padding: [8, lane ? lane.right : 20, 0, 0],
      axes: [
        {...axis, size: 26, values: (u, values) => values.map(at)},
        {...axis, size: lane ? lane.left : 62, splits: () => Array.from({length: 9}, (_, i) => i * tick).filter(n => n <= most),
         values: (u, values) => values.map(n => n ? bytes(n).replace(/\.?0+ /, " ") : "0")},
      ],
      series: [{}, ...KINDS.map(kind => ({paths: uPlot.paths.stepped({align: 1}), points: {show: false}, width: 0, fill: () => colour(kind)})).reverse()],
      hooks: {draw: [mark]},
    }, [x, ...stacks.reverse()], element);

    function tell(event) {
      // A pixel has several points: the highest one near the pointer.
      const [from, to] = [-2, 2].map(by => plot.posToVal(event.offsetX + by, "x"));
      let i = Math.max(0, x.findLastIndex(value => value <= from));
      for (let j = i + 1; j < x.length && x[j] <= to; j++) if (total[j] > total[i]) i = j;
      const [phase, layer] = curve.running[i].map(n => names[n]);
      const alive = curve.layers[i].map(([name, kind, n]) => `${bytes(n)}  ${names[name] || "(the model itself)"}, ${names[kind]}`);
      const when = timed ? seconds(x[i]) : "action " + Math.floor(x[i]);
      show([`${curve.name} at ${when}: ${bytes(total[i])}${phase ? `, in ${phase}` : ""}${layer ? ` of ${layer}` : ""}`, ...alive].join("\n"), event);
    }
    for (const kind of ["mousemove", "mousedown"]) plot.over.addEventListener(kind, tell);
    plot.over.addEventListener("mouseleave", event => show("", event));
    plots.push([element, plot]);
  }

  const data = document.getElementById("curves");
  if (data) {
    const curves = JSON.parse(data.textContent);
    document.querySelectorAll(".plot").forEach((element, i) => {
      // One or two wide curves have the time axis of the lanes above them.
      const time = curves.length <= 2 && innerWidth > 640 ? document.querySelector(".time")?.getBoundingClientRect() : null;
      const box = element.getBoundingClientRect();
      draw(element, curves[i], curves, time && {left: time.left - box.left, right: box.right - time.right});
    });
    const again = () => plots.forEach(([element, plot]) => {
      plot.setSize({width: element.clientWidth, height: element.clientHeight});
      plot.redraw();
    });
    for (const kind of ["resize", "beforeprint", "afterprint"]) addEventListener(kind, again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  }
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(each => each.open = true));
})();
