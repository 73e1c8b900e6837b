// Light or dark: as the system has it, unless the reader chooses.

import { SafeStorage } from "./storage.js";

const KEY = "allfold-colours";
const storage = new SafeStorage(() => localStorage);

function apply(choice) {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
}

export function setUpTheme(select) {
  const kept = storage.get(KEY);
  select.value = ["light", "dark"].includes(kept) ? kept : "auto";
  apply(select.value);
  select.addEventListener("change", () => {
    storage.set(KEY, select.value);
    apply(select.value);
  });
}
