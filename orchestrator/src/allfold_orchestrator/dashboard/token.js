// The question for the token. It is kept until the tab is closed, and sent to this orchestrator alone.

import { h, show } from "./dom.js";
import { SafeStorage } from "./storage.js";

const KEY = `allfold-token:${location.pathname}`;
const storage = new SafeStorage(() => sessionStorage);

export function token() {
  return storage.get(KEY) ?? "";
}

export function forget() {
  storage.remove(KEY);
}

/** Ask for the token in `main`; `problem` says what is wrong with the last one, if there was one. */
export function askForToken(main, problem, onToken) {
  const input = h("input", { id: "token", type: "password", autocomplete: "off", required: true, spellcheck: "false", "aria-describedby": "token-help token-problem", "aria-invalid": problem ? "true" : null });
  const form = h("form", { class: "token", "data-key": "token-form" },
    h("h1", {}, "Which token?"),
    h("p", { id: "token-help" }, "This orchestrator shows its data to those who know its token: the value of ", h("code", {}, "ALLFOLD_TOKEN"), "."),
    h("p", { id: "token-problem", class: "wrong", role: "alert" }, problem),
    h("label", { for: "token" }, "Token"),
    input,
    h("button", { type: "submit" }, "Show the dashboard"),
    h("p", { class: "small" }, "It is kept in this tab until you close it."));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    storage.set(KEY, input.value.trim());
    onToken();
  });
  main.replaceChildren();
  show(main, form);
  input.focus();
}
