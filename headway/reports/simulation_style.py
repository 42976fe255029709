"""The controls of a simulation's page: how they look, and the script that shows the run that they choose."""

CSS = """
.plot{min-width:0}
.chooser{position:sticky;top:0;z-index:5;background:#fff;border:1px solid var(--line);border-radius:10px;
 padding:12px 18px 14px;margin:20px 0 0;box-shadow:0 2px 10px #1f29330f}
.controls{display:flex;flex-wrap:wrap;gap:8px 36px;align-items:center}
.control{border:0;margin:0;padding:0;min-width:0;display:flex;flex-wrap:wrap;align-items:center;gap:4px 12px}
.control>label:first-child,.control legend{font-weight:600;padding:0;float:left}
.slider{flex:1 1 300px}
.slider input{flex:1 1 160px;min-width:120px;height:28px;margin:0;accent-color:var(--blue)}
.slider output{font-weight:650;font-size:1.15rem;min-width:2.6em;font-variant-numeric:tabular-nums}
.options{display:inline-flex;flex-wrap:wrap;border:1px solid #b9c3cd;border-radius:8px;overflow:hidden}
.options label{position:relative;padding:4px 14px;cursor:pointer;border-left:1px solid #b9c3cd}
.options label:first-child{border-left:0}
.options input{position:absolute;opacity:0;inset:0;margin:0;cursor:pointer}
.options label:has(:checked){background:var(--blue);color:#fff}
.options label:has(:focus-visible){outline:3px solid #e0a100;outline-offset:-3px}
select{font:inherit;padding:4px 8px;border:1px solid #b9c3cd;border-radius:8px;background:#fff;color:inherit}
select:focus-visible,.slider input:focus-visible{outline:3px solid #e0a100;outline-offset:2px}
.says{font-size:1.1rem;margin:10px 0 0;min-height:3.2em}
.tiles{grid-template-columns:repeat(5,1fr)}
@media(max-width:700px){.tiles{grid-template-columns:repeat(2,1fr)}}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,310px),1fr));gap:0 22px}
.grid figure{min-width:0}
.grid.two{grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr))}
.wide{max-height:560px;overflow:auto}
.wide:focus-visible{outline:3px solid #e0a100}
.numbers{margin:0}
.numbers thead th{position:sticky;top:0;background:#fff;box-shadow:0 1px 0 var(--line)}
.numbers td:first-child{color:inherit}
.numbers tr.chosen td{background:#e8f0f9;font-weight:650}
.numbers td,.numbers th{padding-left:8px;padding-right:8px}
@media(max-width:600px){.chooser{display:contents}.says{font-size:1rem;min-height:9em}.tiles{margin-top:4px}
 .controls{position:sticky;top:0;z-index:5;background:#fff;border-bottom:1px solid var(--line);padding:8px 0;
 margin-top:14px;gap:4px 20px}}
@media(max-height:560px){.chooser,.controls{position:static}}
"""

SCRIPT = """
const page = JSON.parse(document.getElementById("figures").textContent);
const controls = page.controls.map((control, number) => ({
  ...control, inputs: [...document.querySelectorAll(`[data-control="${number}"]`)],
}));

function index(control) {
  const [first] = control.inputs;
  return Number(first.type === "radio" ? control.inputs.find(input => input.checked).value : first.value);
}

function choose(control, at) {
  const [first] = control.inputs;
  if (first.type === "radio") control.inputs[at].checked = true; else first.value = at;
}

function show() {
  let number = 0;
  for (const control of controls) number = number * control.values.length + index(control);
  const run = page.runs[number];
  for (const [name, figure] of Object.entries(run.figures)) {
    Plotly.react(name, figure.data, figure.layout, {responsive: true, displayModeBar: false});
  }
  document.getElementById("says").textContent = run.says;
  for (const [name, text] of Object.entries(run.tiles)) document.getElementById(name).textContent = text;
  for (const row of document.querySelectorAll("[data-run]")) {
    const chosen = Number(row.dataset.run) === number;
    row.classList.toggle("chosen", chosen);
    if (chosen) row.setAttribute("aria-current", "true"); else row.removeAttribute("aria-current");
  }
  for (const control of controls) {
    const [first] = control.inputs, value = control.values[index(control)];
    if (first.type !== "range") continue;
    first.setAttribute("aria-valuetext", value);
    document.getElementById(first.id + "-value").textContent = value;
  }
}

function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const control of controls) {
    const at = control.values.indexOf(wanted.get(control.name));
    if (at >= 0) choose(control, at);
  }
}

function writeAddress() {
  const chosen = new URLSearchParams(controls.map(control => [control.name, control.values[index(control)]]));
  history.replaceState(null, "", "#" + chosen);
}

let waiting = 0;
for (const control of controls) for (const input of control.inputs) {
  input.addEventListener("input", () => {
    writeAddress();
    if (!waiting) waiting = requestAnimationFrame(() => { waiting = 0; show(); });
  });
}
window.addEventListener("hashchange", () => { readAddress(); show(); });
readAddress();
show();
"""
