
"use strict";
for (const controls of document.querySelectorAll(".controls")) controls.hidden = false;

// One pixel of the picture is one of the screen: CSS pixels are larger where the display is scaled.
function fit() {
  const scale = Number(document.getElementById("zoom").value) / window.devicePixelRatio;
  for (const layer of document.querySelectorAll(".layer")) {
    layer.style.width = layer.getAttribute("width") * scale + "px";
    layer.style.height = layer.getAttribute("height") * scale + "px";
  }
}
document.getElementById("zoom").addEventListener("change", fit);
window.addEventListener("resize", fit);
fit();

for (const picture of document.querySelectorAll(".picture")) {
  const stack = picture.querySelector(".stack");
  const slide = picture.querySelector(".slide");
  const layers = picture.querySelectorAll(".layer");
  const sides = picture.querySelectorAll("select[data-side]");
  const difference = picture.querySelector(".difference");

  function move() {
    stack.style.setProperty("--cut", slide.value + "%");
    slide.setAttribute("aria-valuetext", Math.round(slide.value) + " percent " + sides[0].selectedOptions[0].text
      + ", the rest " + sides[1].selectedOptions[0].text);
  }
  function choose() {
    for (const layer of layers) layer.classList.remove("left", "right");
    for (const side of sides) layers[side.value].classList.add(side.dataset.side);
    stack.classList.toggle("differing", difference.checked);
    move();
  }
  slide.addEventListener("input", move);
  for (const control of [...sides, difference]) control.addEventListener("change", choose);
  stack.classList.add("chosen");
  choose();
}
