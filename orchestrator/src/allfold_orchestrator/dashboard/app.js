// The dashboard: the feed of the orchestrator, shown on the page that the address names.

import { h, show } from "./dom.js";
import { Feed } from "./feed.js";
import { age } from "./format.js";
import { groupPage } from "./group.js";
import { keep } from "./history.js";
import { incidentsPage, nodePage, nodesPage } from "./node.js";
import { overviewPage } from "./overview.js";
import { setUpTheme } from "./theme.js";
import { askForToken, forget, token } from "./token.js";

const TICK_MS = 500;
const OLD_MS = 4000;

const main = document.getElementById("main");
const banner = document.getElementById("banner");
const link = document.getElementById("link");
const news = document.getElementById("news");
const forgetButton = document.getElementById("forget");

let view = null;
let receivedAt = 0;
let way = "";
let lost = null;
let asks = false;
let openedPage = "";
let announced = null;

const feed = new Feed(receive, token);

function receive(message) {
  if (message.refused !== undefined) return ask(message.refused);
  if (message.lost !== undefined) {
    lost = { reason: message.lost, until: Date.now() + message.retryIn * 1000 };
    return tick();
  }
  lost = null;
  asks = false;
  way = message.way;
  receivedAt = Date.now();
  view = message.overview;
  view.byNode = new Map(view.nodes.map((node) => [node.node, node]));
  keep(view);
  announce(view);
  render();
  tick();
}

function ask(reason) {
  const had = token() !== "";
  forget();
  asks = true;
  view = null;
  openedPage = "";
  lost = null;
  tick();
  askForToken(main, had ? "The orchestrator does not know this token. Check ALLFOLD_TOKEN of the orchestrator, and that all of it was copied." : "", () => {
    asks = false;
    feed.start();
  });
  document.title = "Token · Allfold";
  main.dataset.reason = reason;
}

function address() {
  return location.hash || "#/";
}

function page() {
  const [kind = "", name] = address().replace(/^#\/?/, "").split("/").map(decoded);
  if (kind === "groups" && name) return { name: "overview", heading: `Group ${name}`, make: () => groupPage(view, name) };
  if (kind === "nodes" && name) return { name: "nodes", heading: `Node ${name}`, make: () => nodePage(view, name) };
  if (kind === "nodes") return { name: "nodes", heading: "Nodes", make: () => nodesPage(view) };
  if (kind === "incidents") return { name: "incidents", heading: "Incidents", make: () => incidentsPage(view) };
  return { name: "overview", heading: "Overview", make: () => overviewPage(view) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function render() {
  if (!view) return;
  const { name, heading, make } = page();
  const isOther = openedPage !== address();
  if (isOther) main.replaceChildren();
  show(main, make());
  for (const each of document.querySelectorAll("nav a[data-page]")) {
    if (each.dataset.page === name) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  document.title = `${heading} · Allfold`;
  if (isOther && openedPage) {
    window.scrollTo(0, 0);
    main.querySelector("h1")?.focus({ preventScroll: true });
  }
  openedPage = address();
}

/** Say incidents once, when they begin and when they are over: not what ticks. */
function announce({ incidents, at }) {
  const open = new Map(incidents.filter((each) => each.ended === null).map((each) => [each.id, each.sentence]));
  if (announced) {
    const begun = [...open].filter(([id]) => !announced.has(id)).map(([, sentence]) => `Incident: ${sentence}.`);
    const over = [...announced].filter(([id]) => !open.has(id)).map(([, sentence]) => `Over: ${sentence}.`);
    if (begun.length || over.length) show(news, h("p", {}, [...begun, ...over].join(" ")));
  }
  announced = open;
}

function tick() {
  const old = view ? Date.now() - receivedAt : 0;
  forgetButton.hidden = token() === "" || asks;
  if (asks) {
    setLink("asks", "waits for the token");
    return show(banner);
  }
  if (lost) {
    setLink("lost", "not connected");
    return show(banner, lostBanner(old));
  }
  show(banner);
  if (!view) return setLink("opening", "connecting …");
  if (old > OLD_MS) return setLink("old", `${age(old / 1000)} old`);
  return setLink("live", way === "polling" ? "live, by polling" : "live");
}

function setLink(state, text) {
  link.dataset.state = state;
  if (link.textContent !== text) link.textContent = text;
}

function lostBanner(old) {
  const wait = Math.max(0, (lost.until - Date.now()) / 1000);
  const shown = view ? ` What you see is ${age(old / 1000)} old.` : "";
  return h("div", { class: "lost" },
    h("p", {}, h("strong", {}, "No data: "), `${lost.reason}.${shown} Running jobs are not affected.`),
    // Not for readers of the screen, to whom each change of an alert would be read again.
    h("span", { "aria-hidden": "true" }, wait >= 1 ? `Next try in ${Math.round(wait)} s` : "Trying …"),
    h("button", { type: "button", class: "quiet", "data-do": "retry" }, "Try now"));
}

banner.addEventListener("click", (event) => {
  if (event.target.closest("[data-do=retry]")) feed.retry();
});
forgetButton.addEventListener("click", () => {
  feed.stop();
  forget();
  feed.start();
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", render);
document.addEventListener("visibilitychange", () => {
  // Nobody watches a hidden page, so nobody needs to be asked for it.
  if (document.hidden) feed.stop();
  else if (!asks) feed.start();
});
setUpTheme(document.getElementById("theme"));
setInterval(tick, TICK_MS);
feed.start();
