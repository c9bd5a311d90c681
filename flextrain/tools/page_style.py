"""The style of pages: those of plans, and those of reports."""

STYLE = """\
:root { color-scheme: light dark; --ink: #16191d; --soft: #5b6470; --grid: #e4e7eb; --paper: #ffffff; --ground: #f4f5f7;
  --good: #00694e; --bad: #a63c00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e9ecef; --soft: #a3acb8; --grid: #333a43; --paper: #1b1f24;
  --ground: #121519; --good: #4fd0a7; --bad: #ff9a62; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 10px; }
h3 { font-size: 15px; margin: 0 0 4px; overflow-wrap: anywhere; }
header p { margin: 2px 0 14px; color: var(--soft); }
dl { display: flex; flex-wrap: wrap; gap: 6px 28px; margin: 0 0 18px; }
dt, .small, figcaption { color: var(--soft); font-size: 13px; }
dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
section { background: var(--paper); border: 1px solid var(--grid); border-radius: 10px; padding: 16px; margin: 0 0 16px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 7px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
thead th { color: var(--soft); font-weight: 500; font-size: 12px; }
th:first-child, .many td:nth-child(-n+3), .many thead th:nth-child(-n+3) { text-align: left; }
tbody th { position: sticky; left: 0; background: var(--paper); }
.long { display: block; width: 260px; white-space: normal; overflow-wrap: anywhere; }
tbody tr:last-child > * { border-bottom: 0; }
.yes .fits { color: var(--good); font-weight: 600; }
.no .fits, .refused td, .refused strong { color: var(--bad); font-weight: 600; }
.small { margin: 8px 0 10px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; margin: 0 0 10px; padding: 0; font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
figure { margin: 0; }
svg { display: block; width: 100%; max-width: 600px; height: auto; overflow: visible; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 0 16px; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 26px 32px; }
figcaption { margin-top: 6px; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); }
.remarks { margin: 0; padding-left: 18px; overflow-wrap: anywhere; }
.remarks li { margin: 3px 0; }
@media (max-width: 600px) { .long { width: 150px; } main { padding: 14px 8px 32px; } section { padding: 12px; } }
@media print { body { background: #ffffff; } section { break-inside: avoid; } }
"""
