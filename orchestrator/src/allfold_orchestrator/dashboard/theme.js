// Light or dark: as the system has it, unless the reader chooses.

const KEY = "allfold-colours";

function apply(choice) {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
}

export function setUpTheme(select) {
  const kept = localStorage.getItem(KEY);
  select.value = ["light", "dark"].includes(kept) ? kept : "auto";
  apply(select.value);
  select.addEventListener("change", () => {
    localStorage.setItem(KEY, select.value);
    apply(select.value);
  });
}
