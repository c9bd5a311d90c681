"""What the style of a report adds to that of all pages."""

RUN_STYLE = """\
.badge { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; vertical-align: -1px; }
.facts th, .facts td, .settings th, .settings td, .events th, .events td { text-align: left; white-space: normal;
  overflow-wrap: break-word; vertical-align: top; }
.facts thead th, .settings thead th { color: var(--ink); font-size: 13px; font-weight: 600; white-space: nowrap; }
.facts td { min-width: 170px; } .facts tbody th { font-weight: 500; color: var(--soft); white-space: nowrap; width: 1%; }
.settings td { min-width: 130px; font-family: ui-monospace, monospace; font-size: 12px; }
.settings tbody th { font-weight: 500; font-family: ui-monospace, monospace; font-size: 12px; min-width: 130px; }
.events tbody th { font-weight: 400; white-space: nowrap; } .events td:nth-child(2) { white-space: nowrap; }
.events td:nth-child(5) { min-width: 220px; }
.failed td:nth-child(3), .stalled td:nth-child(3), .preempted td:nth-child(3), .error td:nth-child(3),
.warning td:nth-child(3) { color: var(--bad); font-weight: 600; }
.runs { position: sticky; top: 0; z-index: 3; display: flex; flex-wrap: wrap; gap: 4px 18px; background: var(--ground);
  padding: 10px 4px; margin: -6px 0 10px; font-size: 14px; }
.runs label { cursor: pointer; overflow-wrap: anywhere; } .runs input { margin: 0 7px 0 0; vertical-align: -1px; }
.sections { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 0 16px;
  grid-auto-flow: dense; }
.sections > section { grid-column: 1 / -1; min-width: 0; } .sections > .single { grid-column: auto; }
.single svg { max-width: 680px; } .single .legend { min-height: 20px; }
.grid figure { position: relative; min-width: 0; }
.legend b { color: var(--soft); font-weight: 400; margin-right: 4px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)); gap: 16px; }
.pictures img { width: 100%; image-rendering: pixelated; border: 1px solid var(--grid); border-radius: 6px; display: block; }
summary h2 { display: inline; } details[open] > summary { margin-bottom: 10px; }
.shown { position: absolute; z-index: 2; pointer-events: none; background: var(--paper); border: 1px solid var(--grid);
  border-radius: 6px; padding: 5px 9px; font-size: 12px; box-shadow: 0 3px 12px rgb(0 0 0 / 18%); white-space: nowrap;
  font-variant-numeric: tabular-nums; max-width: 100%; overflow: hidden; text-overflow: ellipsis; }
.shown b { font-weight: 600; } .cursor { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 2; }
@media (max-width: 600px) { .facts tbody th { white-space: normal; min-width: 74px; } .facts td { min-width: 138px; }
  .facts th, .facts td { padding: 6px 5px; font-size: 12px; } .grid svg text { font-size: 13px !important; } }
"""
