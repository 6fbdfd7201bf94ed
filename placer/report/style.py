"""The style sheet of the HTML page, with a light and a dark theme."""

STYLE = """
:root { --ink: #1d2129; --dim: #667085; --page: #ffffff; --line: #e2e5ea; --panel: #f6f7f9;
  --good: #12703f; --bad: #b42318; --good-back: #e7f5ec; --bad-back: #fdecea;
  --slow-back: #fdf3d7;
  --parameters: #2f5fb3; --gradients: #7aa3e5; --optimizer: #b9cdf0; --buffers: #8a93a3;
  --saved: #e08a1e; --boundary: #2a9d8f; --transient: #d8c3a5;
  --forward: #7aa3e5; --backward: #2f5fb3; --transfer: #2a9d8f; --step: #e08a1e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --dim: #98a2b3; --page: #14171c;
  --line: #2c323b; --panel: #1c2027; --good: #5fd394; --bad: #ff8f83; --good-back: #14301f;
  --bad-back: #3a1916; --slow-back: #3a3010;
  --parameters: #5b8def; --gradients: #3e62a8; --optimizer: #2c4474;
  --buffers: #7b8494; --saved: #f0a345; --boundary: #3fb8a9; --transient: #7d6c50;
  --forward: #3e62a8; --backward: #5b8def; --transfer: #3fb8a9; --step: #f0a345; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 24px 28px 48px; }
h1 { font-size: 24px; margin: 0 0 12px; }
h2 { font-size: 17px; margin: 32px 0 10px; }
.verdict { font-weight: 600; padding: 9px 14px; border-radius: 6px; margin: 0 0 8px; }
.verdict.good { background: var(--good-back); }
.verdict.slow { background: var(--slow-back); }
.verdict.bad { background: var(--bad-back); }
.good { color: var(--good); } .bad { color: var(--bad); }
.facts { display: flex; flex-wrap: wrap; gap: 10px 28px; margin: 18px 0 0; }
.facts dt { color: var(--dim); font-size: 12px; } .facts dd { margin: 0; font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--dim); font-size: 13px;
  margin: 0 0 6px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px;
  margin-right: 6px; }
.row { display: grid; grid-template-columns: 110px 1fr 90px; gap: 2px 14px; align-items: center;
  padding: 5px 0; font-size: 14px; line-height: 1.3; }
.row small { display: block; color: var(--dim); font-size: 12px; }
.bar { position: relative; height: 22px; background: var(--panel); }
.bar i { position: absolute; top: 0; bottom: 0; print-color-adjust: exact; }
.bar .k-reserve { opacity: .6; }
.bar .k-budget { top: -4px; bottom: -4px; border-left: 2px solid var(--bad); margin-left: -2px; }
.legend i, .verdict { print-color-adjust: exact; }
.k-parameters { background: var(--parameters); }
.k-gradients { background: var(--gradients); }
.k-optimizer { background: var(--optimizer); }
.k-buffers { background: var(--buffers); }
.k-saved { background: var(--saved); }
.k-boundary { background: var(--boundary); }
.k-transient { background: var(--transient); }
.t-forward { background: var(--forward); } .t-backward { background: var(--backward); }
.t-transfer { background: var(--transfer); } .t-optimizer { background: var(--step); }
.bar .t-forward, .bar .t-backward { border-right: 1px solid var(--page); }
.k-reserve { background: repeating-linear-gradient(45deg, var(--dim) 0 1.5px,
  transparent 1.5px 4px); }
.legend .k-budget { width: 2px; height: 14px; background: var(--bad); vertical-align: -2px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--dim); font-weight: 500; font-size: 12px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.name { white-space: nowrap; } .words { overflow-wrap: anywhere; }
.dim { color: var(--dim); font-size: 13px; } code { overflow-wrap: anywhere; }
details { border-bottom: 1px solid var(--line); padding: 6px 0; } summary { cursor: pointer; }
.nodes { font: 12px/1.6 ui-monospace, "DejaVu Sans Mono", monospace; color: var(--dim);
  overflow-wrap: anywhere; margin: 6px 0; }
@media (max-width: 640px) { main { padding: 16px 16px 32px; }
  .row { grid-template-columns: 1fr auto; } .row .bar { grid-row: 2; grid-column: 1 / 3; }
  .row small { display: inline; }
  .cards thead { display: none; }
  .cards tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--line); }
  .cards td { display: flex; justify-content: space-between; gap: 18px; padding: 2px 0; border: 0;
    text-align: right; white-space: normal; }
  .cards td::before { content: attr(data-label); color: var(--dim); flex: none; } }
@media print { main { max-width: none; } }
"""
