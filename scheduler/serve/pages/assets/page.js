// Live figures, and uploads that show how far they are. Without it all else works.
"use strict";

const shown = new Map(); // what the server last sent of each live part: people may have opened something in it
const liveParts = (page) => page.querySelectorAll("[data-live]");
for (const part of liveParts(document)) {
  const sent = part.cloneNode(true);
  for (const opened of sent.querySelectorAll("details[open]")) opened.open = false; // people may be faster than this script
  shown.set(part.id, sent.innerHTML);
}

function isInUse(part) {
  const selection = getSelection();
  return part.contains(document.activeElement) || (!selection.isCollapsed && part.contains(selection.anchorNode));
}

function show(page) {
  for (const part of liveParts(document)) {
    const newest = page.getElementById(part.id);
    if (!newest || shown.get(part.id) === newest.innerHTML || isInUse(part)) continue;
    shown.set(part.id, newest.innerHTML);
    part.replaceChildren(...newest.childNodes);
  }
  const news = document.getElementById("news");
  if (news && !news.dataset.older) {
    news.hidden = [...page.querySelectorAll("tr[id]")].every((row) => document.getElementById(row.id));
  }
}

async function refresh() {
  const connection = document.getElementById("connection");
  try {
    const answer = await fetch(location.href);
    if (answer.redirected) return location.assign(answer.url); // the session has ended
    if (!answer.ok) throw new Error(answer.status);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    show(page);
    connection.textContent = "";
    document.body.dataset.refresh = page.body.dataset.refresh ?? "";
  } catch {
    connection.textContent = "The server does not answer; these figures may be old.";
  }
  refreshLater();
}

function refreshLater() {
  const seconds = Number(document.body.dataset.refresh);
  if (!seconds) return;
  setTimeout(() => (document.hidden ? refreshLater() : refresh()), 1000 * seconds);
}

function startUpload(form) {
  const problem = document.getElementById("upload-problem");
  const sending = document.getElementById("sending");
  const [bar, words, button] = [sending.querySelector("progress"), sending.querySelector("span"), form.querySelector("button")];
  const refuse = (why) => {
    problem.textContent = why;
    sending.hidden = true;
    button.disabled = false;
  };
  const most = Number(form.dataset.maxBytes);
  if (form.elements.file.files[0].size > most) return refuse(`The file is too long: expected at most ${most.toLocaleString()} bytes.`);
  const request = new XMLHttpRequest();
  request.open("POST", form.action);
  request.responseType = "document";
  request.upload.onprogress = (event) => {
    bar.value = event.loaded / event.total;
    words.textContent = event.loaded < event.total ? `${Math.floor(100 * bar.value)} %` : "The server keeps it ...";
  };
  request.onload = () => {
    if (request.status < 400) return location.assign(request.responseURL);
    refuse(request.response?.querySelector(".problem")?.textContent || `The server refused it (${request.status}).`);
  };
  request.onerror = () => refuse("The connection broke off; nothing was kept.");
  problem.textContent = "";
  sending.hidden = false;
  button.disabled = true;
  request.send(new FormData(form));
}

const upload = document.getElementById("upload");
if (upload) {
  upload.addEventListener("submit", (event) => {
    event.preventDefault();
    startUpload(upload);
  });
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    upload.classList.add("over");
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || upload.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    upload.classList.remove("over");
    if (event.dataTransfer.files.length) {
      upload.elements.file.files = event.dataTransfer.files;
      upload.scrollIntoView();
      upload.querySelector("button").focus();
    }
  });
}
document.documentElement.classList.add("scripted");
refreshLater();
