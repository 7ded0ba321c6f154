"use strict";

// The page reads without this: here dots answer to the pointer and pictures can be swiped.

const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";
tip.hidden = true;

for (const svg of document.querySelectorAll(".curve svg")) {
  const cursor = svg.querySelector(".cursor");
  const dots = [...svg.querySelectorAll(".dots a")].map((link) => {
    const use = link.querySelector("use");
    const title = link.querySelector("title");
    title.remove(); // or the browser shows it a second time
    link.setAttribute("aria-label", title.textContent);
    link.setAttribute("tabindex", "-1"); // thousands of stops are no way to walk a page
    return { link, text: title.textContent, x: +use.getAttribute("x"), y: +use.getAttribute("y") };
  });

  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const y = (event.clientY - box.top) * scale;
    let best = null;
    let least = 40 * 40;
    for (const dot of dots) {
      const far = (dot.x - x) ** 2 * 4 + (dot.y - y) ** 2; // across counts more: one row is meant
      if (far < least) [best, least] = [dot, far];
    }
    return best;
  };

  let shown = null;
  const show = (dot, event) => {
    shown = dot;
    tip.hidden = !dot;
    cursor.style.display = dot ? "block" : "none";
    svg.style.cursor = dot ? "pointer" : "";
    if (!dot) return;
    cursor.setAttribute("cx", dot.x);
    cursor.setAttribute("cy", dot.y);
    tip.textContent = dot.text;
    const right = window.scrollX + document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(event.pageX + 14, right))}px`;
    tip.style.top = `${event.pageY + 18}px`;
  };

  let asked = false; // a finger has no hover: the first tap tells, the second goes
  svg.addEventListener("pointermove", (event) => show(nearest(event), event));
  svg.addEventListener("pointerdown", (event) => {
    const dot = nearest(event);
    asked = event.pointerType === "touch" && dot !== shown;
    show(dot, event);
  });
  svg.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") show(null, event);
  });
  svg.addEventListener("click", (event) => {
    event.preventDefault();
    const dot = nearest(event);
    if (!dot || asked) return;
    show(null, event);
    const hash = dot.link.getAttribute("href");
    if (location.hash === hash) reveal(hash);
    else location.hash = hash; // so that Back leads to the curve again
  });
}

function reveal(hash) {
  const row = /^#r\d+$/.test(hash) && document.getElementById(hash.slice(1));
  if (!row) return;
  for (let node = row.parentElement; node; node = node.parentElement) {
    if (node.tagName === "DETAILS") node.open = true;
  }
  document.querySelector("tr.chosen")?.classList.remove("chosen");
  row.classList.add("chosen");
  row.scrollIntoView({ block: "center" });
}

const first = document.querySelector("tr.first");
if (first) { // its table may be long
  const box = first.closest(".scroll");
  box.scrollTop += first.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 2;
}

window.addEventListener("hashchange", () => reveal(location.hash));
reveal(location.hash);

for (const swipe of document.querySelectorAll(".swipe")) {
  const sources = swipe.previousElementSibling.querySelectorAll("img");
  const stage = swipe.querySelector(".stage");
  const range = swipe.querySelector("input");
  const button = swipe.querySelector("button");
  stage.querySelectorAll("img").forEach((image, at) => { image.src = sources[at].src; });
  swipe.hidden = false;

  const place = (percent) => {
    range.value = percent;
    stage.style.setProperty("--at", `${100 - percent}%`);
  };
  const drag = (event) => {
    if (event.buttons !== 1) return;
    const box = stage.getBoundingClientRect();
    place(100 - (100 * (event.clientX - box.left)) / box.width);
  };
  range.addEventListener("input", () => place(+range.value));
  stage.addEventListener("pointerdown", drag);
  stage.addEventListener("pointermove", drag);

  let timer = 0;
  button.addEventListener("click", () => {
    const running = timer !== 0;
    clearInterval(timer);
    timer = 0;
    button.setAttribute("aria-pressed", String(!running));
    if (running) return place(50);
    let over = false;
    timer = setInterval(() => { over = !over; place(over ? 100 : 0); }, 600);
  });
  place(50);
}
