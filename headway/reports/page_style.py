"""The look of a run's page, and the few lines that draw its figures."""

CSS = """
:root{--ink:#1f2933;--muted:#5f6b78;--line:#dfe4e9;--soft:#f5f7f9;--blue:#2f6db3;--orange:#d97b29;--green:#2f8f5b}
*{box-sizing:border-box}
html{color-scheme:light}
body{margin:0;background:#fff;color:var(--ink);line-height:1.5;
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:1100px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:2rem;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.35rem;margin:48px 0 4px;padding-top:20px;border-top:1px solid var(--line)}
h3{font-size:1.05rem;margin:28px 0 0}
p{margin:6px 0}
.lead{font-size:1.1rem;margin:10px 0 14px}
.what{color:var(--muted);margin:0}
.chips{display:flex;flex-wrap:wrap;gap:6px;margin:12px 0 0;padding:0;list-style:none}
.chips li{background:var(--soft);border:1px solid var(--line);border-radius:6px;padding:2px 9px;font-size:.88rem;
 overflow-wrap:anywhere}
.chips b{font-weight:600}
.note{border-left:4px solid var(--orange);background:#fdf5ec;padding:8px 14px;margin:10px 0;border-radius:0 6px 6px 0}
.alarm{border-color:#c0392b;background:#fbefed}
.banner{border:2px solid #c0392b;background:#fbefed;border-radius:8px;padding:12px 18px;margin:0 0 24px}
.banner ul{margin:6px 0 0;padding-left:22px}
.banner b{color:#b03a2e}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:16px;margin:20px 0 0}
.card{border:1px solid var(--line);border-radius:10px;padding:14px 18px 16px}
.card h3{margin:0 0 6px}
.pair{display:grid;grid-template-columns:4.2em 1fr 5.8em;gap:4px 12px;align-items:center;
 font-variant-numeric:tabular-nums}
.pair .value{font-size:1.3rem;font-weight:650;text-align:right;white-space:nowrap}
.pair .detail{grid-column:2/4;color:var(--muted);font-size:.84rem;margin:-4px 0 6px}
.track{position:relative;height:14px;background:var(--soft);border-radius:7px;border:1px solid var(--line)}
.track .fill{position:absolute;inset:0 auto 0 0;border-radius:7px;background:#c9d6e4}
.after .fill{background:#a9cdb8}
.track .interval{position:absolute;top:4px;height:4px;background:#53606c;border-radius:2px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:10px;margin:16px 0 0;padding:0}
.tile{min-width:0;background:var(--soft);border-radius:8px;padding:10px 12px}
.tile b{display:block;font-size:1.15rem;font-weight:650;font-variant-numeric:tabular-nums}
.tile span{color:var(--muted);font-size:.84rem}
figure{margin:24px 0 0;overflow-x:auto;overflow-y:hidden}
figure h3{margin:0}
figcaption{color:var(--muted);font-size:.92rem;margin:0 0 2px}
figcaption b{color:var(--green);font-weight:600}
.plot{width:100%;min-width:640px}
.absent{color:var(--muted);font-size:.92rem;margin-top:16px}
.scale{display:flex;flex-wrap:wrap;gap:4px;align-items:center;font-size:.82rem;color:var(--muted);margin:10px 0}
.swatch{padding:1px 8px;border:1px solid var(--line);border-radius:4px;color:var(--ink)}
.rollouts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:12px;margin-top:10px}
.rollout{border:1px solid var(--line);border-radius:8px;padding:10px 14px;min-width:0}
.rollout header{font-size:.84rem;color:var(--muted)}
.prompt,.answer{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;max-height:340px;overflow:auto;
 font:.86rem/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.prompt{color:var(--muted);border-left:3px solid var(--line);padding-left:10px;margin:8px 0;max-height:160px}
.answer span{border-radius:2px;box-shadow:inset -1px 0 0 rgba(31,41,51,.09)}
.answer .u{opacity:.6}
.good{color:var(--green)}.bad{color:#b03a2e}.unscored{color:var(--orange)}
details{margin:14px 0}
summary{cursor:pointer;font-weight:600}
pre{background:var(--soft);border:1px solid var(--line);border-radius:8px;padding:14px;overflow:auto;font-size:.84rem;
 line-height:1.5}
table{border-collapse:collapse;font-size:.9rem;margin:8px 0}
td{padding:2px 14px 2px 0;vertical-align:top;overflow-wrap:anywhere}
td:first-child{color:var(--muted)}
.objective{border-left:3px solid var(--line);padding:0 0 2px 16px;margin:10px 0;font-size:.92rem}
.objective h4{margin:10px 0 2px;font-size:.92rem;color:var(--muted);font-weight:600}
.objective div{overflow-wrap:anywhere;padding-left:1.4em;text-indent:-1.4em}
.over{color:var(--muted);font-size:.92rem}
.glance{width:100%;font-size:1rem;margin:4px 0 0}
.glance td{padding:4px 18px 4px 0;border-top:1px solid var(--line)}
.glance td:first-child{white-space:nowrap}
.glance span{display:inline-block;margin-right:22px}
.glance b{font-weight:650;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}
.numbers{font-variant-numeric:tabular-nums;font-size:.84rem}
.numbers th{text-align:right;color:var(--muted);font-weight:600;padding:4px 14px 6px 0;vertical-align:bottom}
.numbers td{text-align:right;white-space:nowrap;border-top:1px solid var(--line);padding:3px 14px 3px 0}
.numbers td:first-child{text-align:left}
footer{color:var(--muted);font-size:.84rem;margin-top:40px}
@media(max-width:600px){main{padding:20px 12px 48px}h1{font-size:1.5rem}}
"""

DRAW = """
const figures = JSON.parse(document.getElementById("figures").textContent);
for (const [name, figure] of Object.entries(figures)) {
  Plotly.newPlot(name, figure.data, figure.layout, {responsive: true, displayModeBar: false});
}
"""
